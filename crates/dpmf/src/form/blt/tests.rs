use super::*;
use crate::workload::Optimizer;
use proptest::prelude::*;

#[test]
fn one_two_and_three_steps_in_closed_form() {
    let one = Blt::new(vec![0.5], vec![0.5], vec![0.5], vec![2.0]).unwrap();
    assert_eq!((one.encoder()[(0, 0)], one.coloring()[(0, 0)]), (1.0, 1.0));
    let three = Blt::new(vec![0.5], vec![0.5], vec![1.0, 1.0, 2.0], vec![1.0, 0.5, 1.0]).unwrap();
    let c = Mat::from_fn(3, 3, |i, j| [[1.0, 0.0, 0.0], [0.5, 2.0, 0.0], [0.125, 0.5, 0.5]][i][j]);
    assert_eq!(three.encoder(), c);
    let n = Mat::from_fn(3, 3, |i, j| [[1.0, 0.0, 0.0], [-0.25, 0.5, 0.0], [0.0, -0.5, 2.0]][i][j]);
    assert_eq!(three.coloring(), n);
    assert_eq!(three.cost(), Cost::stream(1, 4.0));
    // The prefix sums of N's columns: 1, 0.75, 0.75; 0.5, 0; 2.
    let loss = three.decoder_row_norms_sq(&Workload::prefix_sum(3).unwrap());
    let exact = [1.0, 0.5625 + 0.25, 0.5625 + 4.0];
    assert!(loss.iter().zip(exact).all(|(a, b)| (a - b).abs() < 1e-14), "{loss:?}");
}

#[test]
fn bad_coefficients_are_named() {
    let refused = |weights: f64, decay: f64, direct: f64, scale: f64| {
        Blt::new(vec![weights], vec![decay], vec![1.0, direct], vec![1.0, scale]).unwrap_err().to_string()
    };
    assert!(refused(-0.1, 0.5, 1.0, 1.0).contains("weights[0] is -0.1"));
    assert!(refused(0.1, 1.0, 1.0, 1.0).contains("decays[0] is 1"));
    assert!(refused(0.1, 0.5, 0.0, 1.0).contains("direct coefficients[1] is 0"));
    assert!(refused(0.1, 0.5, 1.0, f64::NAN).contains("scales[1] is NaN"));
    assert!(Blt::new(vec![], vec![], vec![], vec![]).unwrap_err().to_string().contains("at least one step"));
    assert!(Blt::new(vec![0.1], vec![], vec![1.0], vec![1.0]).unwrap_err().to_string().contains("decays"));
    // Rounded to one, a decay would never forget.
    let close = Blt::new(vec![0.1], vec![1.0 - 1e-12], vec![1.0], vec![1.0]).unwrap();
    assert!(close.rounded().is_ok());
}

proptest! {
    #[test]
    fn structured_equals_dense(
        n in 1..12_usize,
        exponentials in prop::collection::vec((0.0..0.6_f64, 0.0..0.99_f64), 0..4),
        scales in prop::collection::vec((0.5..2.0_f64, 0.5..2.0_f64), 12),
        momentum in prop_oneof![Just(0.0), 0.1..0.9_f64],
    ) {
        let (weights, decays) = exponentials.into_iter().unzip();
        let (direct, scale) = scales.into_iter().take(n).unzip();
        let blt = Blt::new(weights, decays, direct, scale).unwrap().rounded().unwrap();
        let (coloring, encoder) = (blt.coloring(), blt.encoder());
        prop_assert!((&coloring * &encoder - Mat::<f64>::identity(n, n)).norm_max() < 1e-10);
        let mut columns = vec![0.0; n * n];
        let distances = blt.encoder_columns().write(&(0..n).collect::<Vec<_>>(), &mut columns);
        for (j, bound) in blt.encoder_column_norms_sq().into_iter().enumerate() {
            let exact = encoder.col(j).squared_norm_l2();
            prop_assert!(bound >= exact && bound < exact * (1.0 + 1e-12));
            prop_assert!(distances[j] < 1e-13 * exact.sqrt());
            for i in 0..n {
                prop_assert!(encoder[(i, j)] >= 0.0);
                prop_assert!((columns[j * n + i] - encoder[(i, j)]).abs() <= 1e-15 * exact.sqrt());
            }
        }
        let optimizer = Optimizer { momentum, ..Default::default() };
        let workload = Workload::sgd(vec![0.5; n], optimizer).unwrap();
        let decoder = workload.to_dense() * &coloring;
        for (i, norm) in blt.decoder_row_norms_sq(&workload).into_iter().enumerate() {
            let exact = decoder.row(i).squared_norm_l2();
            prop_assert!((norm - exact).abs() < 1e-9 * exact, "{norm} {exact}");
        }
        let mut tensors = Tensors::default();
        blt.write(&mut tensors);
        prop_assert_eq!(Blt::read(n, &mut tensors).unwrap(), blt);
    }
}
