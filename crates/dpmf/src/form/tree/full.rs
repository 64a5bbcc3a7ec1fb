//! The full Honaker estimator `N = C⁺ = G⁻¹Cᵀ`, `G = CᵀC`, in closed form.
//!
//! `G` is block diagonal over the trees of the forest, and on a complete tree with root level `K`
//!
//! - `G⁻¹ = I − Σ α_k 1_v 1_vᵀ` over nodes `v` of level `k ≥ 1`, `α_k = 1/((2^k − 1)(2^{k+1} − 1))`: one
//!   Sherman–Morrison step a node, from `G 1 = (2^{K+1} − 1) 1`;
//! - the Haar wavelets are its eigenvectors, with eigenvalue `1/(2^k − 1)` for the difference of the two
//!   halves of a node of level `k`, and `1/(2^{K+1} − 1)` for the constant.

use super::blocks;
use crate::workload::Workload;
use faer::Mat;

/// `2^k`.
fn size(level: usize) -> f64 {
    (1_u64 << level) as f64
}

/// The tree that holds leaf `i`: its first leaf and root level.
fn tree_of(steps: usize, i: usize) -> (usize, usize) {
    let level = (i ^ steps).ilog2() as usize;
    (steps >> (level + 1) << (level + 1), level)
}

/// Row `i` of `C⁺`. Cost: O(nodes of the tree of leaf `i`).
///
/// Node `b` of level `k` has weight `1/(2^{k+1} − 1) − 2^k Σ_{l>k} α_l` when it is over `i`, else
/// `−2^k Σ_{l≥a} α_l`, where `a` is the level of the lowest node over both.
pub(super) fn row(steps: usize, i: usize, out: &mut [f64]) {
    let (start, root) = tree_of(steps, i);
    let mut tail = vec![0.0; root + 2]; // tail[k] = Σ_{l≥k} α_l
    for k in (1..=root).rev() {
        tail[k] = tail[k + 1] + 1.0 / ((size(k) - 1.0) * (size(k + 1) - 1.0));
    }
    let i = i - start;
    let mut node = super::nodes_within(start);
    for end in 1..=1_usize << root {
        for k in 0..=end.trailing_zeros() as usize {
            let apart = ((end - 1) >> k) ^ (i >> k);
            out[node] = if apart == 0 {
                1.0 / (size(k + 1) - 1.0) - size(k) * tail[k + 1]
            } else {
                -size(k) * tail[k + 1 + apart.ilog2() as usize]
            };
            node += 1;
        }
    }
}

/// Squared row norms of `A C⁺`: those of `A W`, with `W` the scaled Haar wavelets, `W Wᵀ = G⁻¹`.
///
/// A sum of squares: nothing cancels. Cost: O(n² w).
pub(super) fn row_norms_sq(steps: usize, workload: &Workload) -> Vec<f64> {
    workload.row_norms_sq_of_product(steps, |i, out| {
        let (start, root) = tree_of(steps, i);
        out[start] = 1.0 / (size(root) * (size(root + 1) - 1.0)).sqrt();
        for k in 1..=root {
            // Column: the middle of the node, different for every node of the tree.
            let middle = ((i - start) >> k << k) + (1 << (k - 1));
            let sign = if i - start < middle { 1.0 } else { -1.0 };
            out[start + middle] = sign / (size(k) * (size(k) - 1.0)).sqrt();
        }
    })
}

/// The Cholesky factor of `G⁻¹`.
///
/// Column `j` is `x/√x_j`, where `x` solves `G' x = e_j` on leaves `≥ j`. Seen from leaf `j` upwards, `G'`
/// grows by the right sibling of the path, if there is one, and by `1 1ᵀ`; so `x` is constant on each right
/// sibling, and a column takes O(log² n) operations.
pub(super) fn lower_triangular(steps: usize) -> Mat<f64> {
    struct Sibling {
        first: usize,
        size: usize,
        x: f64,
        y: f64,
    }
    let mut factor = Mat::zeros(steps, steps);
    let mut siblings: Vec<Sibling> = Vec::new();
    for (end, root) in blocks(steps) {
        let start = end - (1 << root);
        for j in 0..1_usize << root {
            // x = G'⁻¹e_j and y = G'⁻¹1; by symmetry 1ᵀx = y_j.
            let (mut x_j, mut y_j, mut total_y) = (1.0, 1.0, 1.0);
            siblings.clear();
            for k in 1..=root {
                let half = 1 << (k - 1);
                if j & half == 0 {
                    let y = 1.0 / (size(k) - 1.0);
                    siblings.push(Sibling { first: (j | (half - 1)) + 1, size: half, x: 0.0, y });
                    total_y += half as f64 * y;
                }
                let shrink = 1.0 / (1.0 + total_y);
                for sibling in &mut siblings {
                    sibling.x -= sibling.y * y_j * shrink;
                    sibling.y *= shrink;
                }
                x_j -= y_j * y_j * shrink;
                y_j *= shrink;
                total_y *= shrink;
            }
            let column = &mut factor.col_as_slice_mut(start + j)[start..];
            let root_x: f64 = f64::sqrt(x_j);
            column[j] = root_x;
            for s in &siblings {
                column[s.first..s.first + s.size].fill(s.x / root_x);
            }
        }
    }
    factor
}
