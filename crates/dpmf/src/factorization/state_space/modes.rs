//! Block-diagonal transitions: `Q` processes of order `m`, side by side.

/// A matrix of `m × m` blocks, each diagonal of size `Q`: entry `(c·Q + q, d·Q + q)` is `at(c, d)[q]`.
///
/// Component-major order makes every product with it an elementwise one over `Q` contiguous numbers.
#[derive(Clone, Debug)]
pub(super) struct Modes {
    m: usize,
    q: usize,
    blocks: Vec<f64>,
}

impl Modes {
    pub fn zeros(m: usize, q: usize) -> Self {
        Self { m, q, blocks: vec![0.0; m * m * q] }
    }

    /// Number of states, `m·Q`.
    pub fn states(&self) -> usize {
        self.m * self.q
    }

    pub fn at(&self, c: usize, d: usize) -> &[f64] {
        &self.blocks[(c * self.m + d) * self.q..][..self.q]
    }

    pub fn at_mut(&mut self, c: usize, d: usize) -> &mut [f64] {
        &mut self.blocks[(c * self.m + d) * self.q..][..self.q]
    }

    /// `out = F x`.
    pub fn apply(&self, x: &[f64], out: &mut [f64]) {
        out.fill(0.0);
        for c in 0..self.m {
            for d in 0..self.m {
                multiply_add(&mut out[c * self.q..][..self.q], self.at(c, d), &x[d * self.q..][..self.q]);
            }
        }
    }

    /// `out = Fᵀ x`.
    pub fn apply_transposed(&self, x: &[f64], out: &mut [f64]) {
        out.fill(0.0);
        for c in 0..self.m {
            for d in 0..self.m {
                multiply_add(&mut out[d * self.q..][..self.q], self.at(c, d), &x[c * self.q..][..self.q]);
            }
        }
    }

    /// `out = F X` for a matrix `X` of `columns` columns stored by rows.
    pub fn apply_rows(&self, x: &[f64], columns: usize, out: &mut [f64]) {
        out.fill(0.0);
        for c in 0..self.m {
            for d in 0..self.m {
                for (q, &f) in self.at(c, d).iter().enumerate() {
                    let target = &mut out[(c * self.q + q) * columns..][..columns];
                    let source = &x[(d * self.q + q) * columns..][..columns];
                    target.iter_mut().zip(source).for_each(|(t, s)| *t += f * s);
                }
            }
        }
    }

    /// `G ← F G Fᵀ` for a symmetric `G`.
    pub fn propagate(&self, g: &mut [f64], scratch: &mut [f64]) {
        self.congruence(g, scratch, false);
    }

    /// `G ← Fᵀ G F` for a symmetric `G`.
    pub fn pull_back(&self, g: &mut [f64], scratch: &mut [f64]) {
        self.congruence(g, scratch, true);
    }

    fn congruence(&self, g: &mut [f64], scratch: &mut [f64], transposed: bool) {
        let (m, q, states) = (self.m, self.q, self.states());
        if states == 0 {
            return;
        }
        let block = |c: usize, d: usize| if transposed { self.at(d, c) } else { self.at(c, d) };
        // Rows, then columns.
        for c in 0..m {
            for (lane, target) in scratch[c * q * states..][..q * states].chunks_exact_mut(states).enumerate()
            {
                let f = block(c, 0)[lane];
                let source = &g[lane * states..][..states];
                target.iter_mut().zip(source).for_each(|(t, s)| *t = f * s);
                for d in 1..m {
                    let f = block(c, d)[lane];
                    let source = &g[(d * q + lane) * states..][..states];
                    target.iter_mut().zip(source).for_each(|(t, s)| *t += f * s);
                }
            }
        }
        for (source, target) in scratch.chunks_exact(states).zip(g.chunks_exact_mut(states)) {
            for c in 0..m {
                let out = &mut target[c * q..][..q];
                out.iter_mut().zip(block(c, 0)).zip(&source[..q]).for_each(|((o, f), s)| *o = f * s);
                for d in 1..m {
                    multiply_add(out, block(c, d), &source[d * q..][..q]);
                }
            }
        }
    }
}

fn multiply_add(out: &mut [f64], f: &[f64], x: &[f64]) {
    out.iter_mut().zip(f).zip(x).for_each(|((o, f), x)| *o += f * x);
}
