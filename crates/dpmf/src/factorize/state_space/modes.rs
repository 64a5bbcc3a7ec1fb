//! Block-diagonal transitions: `Q` processes of order `m`, side by side.

/// A block-diagonal matrix of `Q` blocks of size `m × m`; the states of a process are neighbours.
#[derive(Clone, Debug)]
pub(super) struct Modes {
    m: usize,
    /// Block after block, each by rows.
    blocks: Vec<f64>,
}

impl Modes {
    pub fn zeros(m: usize, q: usize) -> Self {
        Self { m, blocks: vec![0.0; m * m * q] }
    }

    /// The blocks, each by rows.
    pub fn blocks(&self) -> impl Iterator<Item = &[f64]> {
        self.blocks.chunks_exact((self.m * self.m).max(1))
    }

    /// The blocks, each by rows.
    pub fn blocks_mut(&mut self) -> impl Iterator<Item = &mut [f64]> {
        self.blocks.chunks_exact_mut((self.m * self.m).max(1))
    }

    /// `out = F x`.
    pub fn apply(&self, x: &[f64], out: &mut [f64]) {
        self.apply_rows(x, 1, out);
    }

    /// `out = F X` for a matrix `X` of `columns` columns stored by rows.
    pub fn apply_rows(&self, x: &[f64], columns: usize, out: &mut [f64]) {
        let size = self.m * columns;
        if size == 0 {
            return;
        }
        let parts = x.chunks_exact(size).zip(out.chunks_exact_mut(size));
        for (block, (x, out)) in self.blocks().zip(parts) {
            for (row, out) in block.chunks_exact(self.m).zip(out.chunks_exact_mut(columns)) {
                out.fill(0.0);
                for (f, x) in row.iter().zip(x.chunks_exact(columns)) {
                    out.iter_mut().zip(x).for_each(|(o, x)| *o += f * x);
                }
            }
        }
    }

    /// `xᵀ ← xᵀF`, for the part of a row from process `first` on.
    pub fn apply_left(&self, first: usize, x: &mut [f64]) {
        self.multiply(first, x, |m, c, d| c * m + d);
    }

    /// `xᵀ ← xᵀFᵀ`, for the part of a row from process `first` on.
    pub fn apply_left_transposed(&self, first: usize, x: &mut [f64]) {
        self.multiply(first, x, |m, c, d| d * m + c);
    }

    /// `x_d ← Σ_c x_c block[at(m, c, d)]` in every block.
    #[inline(always)]
    fn multiply(&self, first: usize, x: &mut [f64], at: impl Fn(usize, usize, usize) -> usize) {
        let blocks = &self.blocks[first * self.m * self.m..];
        match self.m {
            0 => {}
            1 => x.iter_mut().zip(blocks).for_each(|(x, f)| *x *= f),
            2 => {
                for (x, f) in x.chunks_exact_mut(2).zip(blocks.chunks_exact(4)) {
                    let (a, b) = (x[0], x[1]);
                    x[0] = a * f[at(2, 0, 0)] + b * f[at(2, 1, 0)];
                    x[1] = a * f[at(2, 0, 1)] + b * f[at(2, 1, 1)];
                }
            }
            m => {
                let mut old = vec![0.0; m];
                for (x, f) in x.chunks_exact_mut(m).zip(blocks.chunks_exact(m * m)) {
                    old.copy_from_slice(x);
                    for (d, x) in x.iter_mut().enumerate() {
                        *x = old.iter().enumerate().map(|(c, old)| old * f[at(m, c, d)]).sum();
                    }
                }
            }
        }
    }
}
