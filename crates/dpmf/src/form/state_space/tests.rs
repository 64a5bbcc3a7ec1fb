use super::*;
use crate::form::Representation;
use faer::Mat;

#[test]
fn parts_are_checked() {
    let good = || Parts {
        direct: vec![1.0, 2.0],
        output: vec![0.0, 0.5],
        input: vec![0.25, 0.0],
        increment: vec![-1.0, -0.5],
    };
    let filter = StateSpace::from_parts(1, good()).unwrap();
    assert_eq!(filter.parts(), &good());
    assert_eq!(filter.coloring(), Mat::from_fn(2, 2, |i, j| [[1.0, 0.0], [0.125, 2.0]][i][j]));

    let refuse = |order, change: &dyn Fn(&mut Parts), kind: &str| {
        let mut parts = good();
        change(&mut parts);
        assert_eq!(StateSpace::from_parts(order, parts).unwrap_err().kind(), kind);
    };
    refuse(2, &|_| {}, "wrong-length");
    refuse(usize::MAX, &|_| {}, "invalid-argument");
    refuse(1, &|p| p.increment.truncate(1), "wrong-length");
    refuse(1, &|p| p.direct[1] = 0.0, "invalid-argument");
    refuse(1, &|p| p.output[1] = f64::NAN, "invalid-argument");
    refuse(0, &|p| *p = Parts::default(), "invalid-argument");
}

/// Coefficients of f32 whose Gramian overflows in f64: infinity times zero must not pass for nothing.
#[test]
fn no_sensitivity_hides_in_an_overflow() {
    let parts = Parts {
        direct: vec![1.0, 1e-38, 1e-38, 1e-38],
        output: [1e38, 0.0].repeat(4),
        input: [1e38, 0.0].repeat(4),
        increment: [0.0; 3].repeat(4),
    };
    let norms = StateSpace::from_parts(2, parts).unwrap().encoder_column_norms_sq();
    assert_eq!(norms[0], f64::INFINITY);
}
