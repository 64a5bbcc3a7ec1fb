//! Tables in memory, such as the data frames of other languages.

use super::rows::Cell;
use std::fmt::Write;

/// A column of a table in memory.
#[derive(Debug, Clone, PartialEq)]
pub enum FrameColumn {
    /// Numbers; one that is not finite is missing.
    Numbers(Vec<f64>),
    /// Whole numbers.
    Integers(Vec<i64>),
    /// Words; nothing where a value is missing.
    Texts(Vec<Option<String>>),
}

impl FrameColumn {
    /// Number of rows.
    pub fn len(&self) -> usize {
        match self {
            Self::Numbers(values) => values.len(),
            Self::Integers(values) => values.len(),
            Self::Texts(values) => values.len(),
        }
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A field as a file would have it, in `text` if it has to be written.
    fn cell<'a>(&'a self, row: usize, text: &'a mut String) -> Cell<'a> {
        text.clear();
        let written = match self {
            Self::Numbers(values) if values[row].is_finite() => write!(text, "{}", values[row]),
            Self::Numbers(_) => return None,
            Self::Integers(values) => write!(text, "{}", values[row]),
            Self::Texts(values) => return values[row].as_deref(),
        };
        written.is_ok().then_some(text)
    }
}

/// A table in memory.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Frame {
    /// What messages call it.
    pub name: String,
    /// Names and columns, all of as many rows.
    pub columns: Vec<(String, FrameColumn)>,
}

impl Frame {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.columns.first().map_or(0, |(_, column)| column.len())
    }

    /// Hands the wanted fields of every row to `each`, with the number of the row from 1.
    pub(super) fn each(&self, wanted: &[&str], each: &mut dyn FnMut(usize, &[Cell<'_>])) {
        let find =
            |name: &&str| self.columns.iter().find(|(column, _)| column == name).map(|(_, column)| column);
        let columns: Vec<Option<&FrameColumn>> = wanted.iter().map(find).collect();
        let mut texts = vec![String::new(); wanted.len()];
        for row in 0..self.rows() {
            let cells = columns.iter().zip(&mut texts);
            let cells: Vec<Cell<'_>> =
                cells.map(|(column, text)| column.and_then(|column| column.cell(row, text))).collect();
            each(row + 1, &cells);
        }
    }
}
