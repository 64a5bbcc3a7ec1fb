//! Squared row norms of `A N` for the streaming decoders, without forming a row of length `m`.
//!
//! The live estimates rest on disjoint nodes, so they are orthogonal directions in noise space. All that the
//! future needs of the optimizer's states is their coordinates on these directions and, for the part that no live
//! estimate shares, a triangular factor of their Gram matrix. Coordinates, not covariances, are carried along:
//! differences of nearly equal outputs (momentum, averages) lose no more digits than in dense rows.

use super::Level;
use crate::workload::realisation::Realisation;

/// Cost: O(n ρ (log n + ρ²)) with `ρ` the number of states of the optimizer.
pub(super) fn row_norms_sq(levels: &[Level], optimizer: Realisation<'_>) -> Vec<f64> {
    let past = optimizer.states();
    let deviations = deviations(levels);

    // Rows: the states. Columns: `past` coordinates shared with no live estimate, then one for the live estimate of
    // each level.
    let mut rows = vec![vec![0.0; past + levels.len()]; past];
    let (mut f, mut g) = (Vec::new(), Vec::new());
    let mut combination = Vec::with_capacity(levels.len());
    let mut norms = Vec::with_capacity(optimizer.steps());
    for i in 0..optimizer.steps() {
        // The estimate completed here, on the unit directions of the estimates that merge and, last, on the
        // fresh noise; this uses the column of its own level, which is free.
        let merged = (i + 1).trailing_zeros() as usize;
        combination.clear();
        let mut fresh_sq = levels[0].own * levels[0].own;
        for k in 0..merged {
            let Level { own, below } = levels[k + 1];
            combination.push(deviations[k]);
            combination.iter_mut().for_each(|c| *c *= below);
            fresh_sq = below * below * fresh_sq + own * own;
        }
        combination.push(fresh_sq.sqrt());

        let mut input = vec![0.0; past + levels.len()];
        input[past..=past + merged].copy_from_slice(&combination);
        for k in 0..merged {
            input[past + k] -= deviations[k];
        }

        optimizer.write(i, &mut f, &mut g);
        let old = rows.clone();
        for ((row, f), g) in rows.iter_mut().zip(f.chunks_exact(past)).zip(&g) {
            row.iter_mut().zip(&input).for_each(|(x, u)| *x = g * u);
            f.iter().zip(&old).for_each(|(f, old)| accumulate(row, *f, old));
        }
        norms.push(rows[past - 1].iter().map(|x| x * x).sum());

        if merged > 0 {
            // Turn the directions of the merged estimates so that the new one has the last column.
            let sign = reflect(&mut rows, past, &combination, merged);
            rows.iter_mut().for_each(|row| row[past + merged] *= sign);
            // What is orthogonal to it is no longer shared with a live estimate.
            for r in 0..past {
                let tail = rows[r][r..past + merged].to_vec();
                reflect(&mut rows, r, &tail, 0);
            }
            rows.iter_mut().for_each(|row| row[past..past + merged].fill(0.0));
        }
    }
    norms
}

/// Standard deviation of an estimate, by level.
fn deviations(levels: &[Level]) -> Vec<f64> {
    let mut variance = 0.0;
    let step = |level: &Level| {
        variance = level.own * level.own + 2.0 * level.below * level.below * variance;
        variance.sqrt()
    };
    levels.iter().map(step).collect()
}

/// Applies to the columns from `first` on of every row the Householder reflection that takes `vector` to a
/// multiple of the unit vector `pivot`, and returns the sign of that multiple.
fn reflect(rows: &mut [Vec<f64>], first: usize, vector: &[f64], pivot: usize) -> f64 {
    let norm = vector.iter().map(|x| x * x).sum::<f64>().sqrt();
    if norm == 0.0 {
        return 1.0;
    }
    // Away from the vector, so that the normal is not a difference of nearly equal numbers.
    let sign = if vector[pivot] < 0.0 { 1.0 } else { -1.0 };
    let mut normal = vector.to_vec();
    normal[pivot] -= sign * norm;
    let scale = 2.0 / normal.iter().map(|x| x * x).sum::<f64>();
    for row in rows {
        let part = &mut row[first..first + vector.len()];
        let along = scale * part.iter().zip(&normal).map(|(x, v)| x * v).sum::<f64>();
        part.iter_mut().zip(&normal).for_each(|(x, v)| *x -= along * v);
    }
    sign
}

fn accumulate(out: &mut [f64], factor: f64, x: &[f64]) {
    out.iter_mut().zip(x).for_each(|(o, x)| *o += factor * x);
}
