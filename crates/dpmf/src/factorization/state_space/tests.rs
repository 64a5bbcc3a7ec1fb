use super::*;
use crate::workload::{Optimizer, Schedule};
use faer::Side;

fn x_of(a: &Mat<f64>, v: &[f64]) -> Mat<f64> {
    let n = v.len();
    // A D^{1/2} = U Σ Wᵀ, so X = D^{-1/2} W Σ Wᵀ D^{-1/2}.
    let scaled = Mat::from_fn(n, n, |i, j| a[(i, j)] * v[j].sqrt());
    let svd = scaled.svd().unwrap();
    let w = Mat::from_fn(n, n, |i, k| svd.V()[(i, k)] * svd.S().column_vector()[k].sqrt() / v[i].sqrt());
    &w * w.transpose()
}

fn solve(a: &Mat<f64>, rounds: usize) -> (Vec<f64>, f64) {
    let n = a.nrows();
    let mut v: Vec<f64> = (0..n).map(|j| a.col(j).norm_l2()).collect();
    let mut bound = 0.0_f64;
    for _ in 0..rounds {
        let x = x_of(a, &v);
        let phi: f64 = (0..n).map(|i| v[i] * x[(i, i)]).sum();
        bound = bound.max(phi * phi / v.iter().sum::<f64>());
        let max = (0..n).map(|i| x[(i, i)]).fold(0.0, f64::max);
        if max * phi / bound - 1.0 < 1e-9 {
            break;
        }
        (0..n).for_each(|i| v[i] *= x[(i, i)] * x[(i, i)]);
    }
    (v, bound)
}

fn loss(s: &StateSpace, w: &Workload) -> f64 {
    let rows: f64 = s.decoder_row_norms_sq(w).iter().sum();
    let gamma = s.encoder_column_norms_sq().into_iter().fold(0.0, f64::max);
    rows * gamma
}

#[test]
fn scratch() {
    let w = Workload::prefix_sum(64).unwrap();
    let a = w.to_dense();
    let (v, bound) = solve(&a, 200);
    let s = StateSpace::optimal(w.recurrence().unwrap(), &v, 1e-12).unwrap();
    let c = s.encoder();
    let x = c.transpose() * &c;
    let exact = x_of(&a, &v);
    println!("order {} err {:e}", s.order(), (&x - &exact).norm_max());
    println!("ratio {:e}", (loss(&s, &w) / bound).sqrt() - 1.0);
    for r in 0..8 {
        let t = StateSpace::truncated(w.recurrence().unwrap(), &v, Order::Fixed(r)).unwrap();
        println!("r {r} ratio {:e}", (loss(&t, &w) / bound).sqrt() - 1.0);
    }
}
