use super::*;
use crate::workload::Optimizer;
use proptest::prelude::*;

#[test]
fn one_two_and_three_steps_in_closed_form() {
    let one = Banded::toeplitz(&[2.0, 1.0], vec![1.0]).unwrap();
    assert_eq!((one.encoder()[(0, 0)], one.coloring()[(0, 0)]), (2.0, 0.5));
    assert_eq!(one.encoder_column_norms_sq()[0], 4.0 * (1.0 + 18.0 * f64::EPSILON));
    assert_eq!(one.cost(), Cost::stream(1, 2.0));

    let three = Banded::toeplitz(&[1.0, 0.5], vec![1.0, 1.0, 2.0]).unwrap();
    let c = Mat::from_fn(3, 3, |i, j| [[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.0, 0.5, 2.0]][i][j]);
    let n = Mat::from_fn(3, 3, |i, j| [[1.0, 0.0, 0.0], [-0.5, 1.0, 0.0], [0.125, -0.25, 0.5]][i][j]);
    assert_eq!((three.encoder(), three.coloring()), (c.clone(), n));
    let same = Banded::from_encoder(3, 2, |t, k| c[(t, t - k)]).unwrap();
    assert_eq!((same.encoder(), same.coloring()), (three.encoder(), three.coloring()));
    assert_eq!(same.cost(), Cost::stream(1, (5.0 + 3.0) / 3.0));
    // The prefix sums of N's columns: 1, 0.5, 0.625; 1, 0.75; 0.5.
    let loss = three.decoder_row_norms_sq(&Workload::prefix_sum(3).unwrap());
    let exact = [1.0, 0.25 + 1.0, 0.390625 + 0.5625 + 0.25];
    assert!(loss.iter().zip(exact).all(|(a, b)| (a - b).abs() < 1e-14), "{loss:?}");
}

#[test]
fn bad_coefficients_are_named() {
    let refused = |banded: Result<Banded>| banded.unwrap_err().to_string();
    assert!(refused(Banded::new(1, vec![1.0], vec![])).contains("at least one step"));
    assert!(refused(Banded::new(0, vec![], vec![1.0])).contains("the diagonal"));
    assert!(refused(Banded::new(2, vec![1.0; 3], vec![1.0; 2])).contains("feedback coefficients"));
    assert!(refused(Banded::new(2, vec![1.0, 0.0, 0.0, 1.0], vec![1.0; 2])).contains("[2] is 0"));
    assert!(refused(Banded::new(1, vec![f64::NAN], vec![1.0])).contains("finite"));
    assert!(refused(Banded::new(1, vec![1.0], vec![1.0, -1.0])).contains("scales[1]"));
    // Below the smallest f32.
    assert!(Banded::new(1, vec![1e-60], vec![1.0]).unwrap().rounded().is_err());
}

proptest! {
    #[test]
    fn structured_equals_dense(
        n in 1..12_usize,
        bands in 1..6_usize,
        constant in any::<bool>(),
        entries in prop::collection::vec(-0.5..0.5_f64, 72),
        momentum in prop_oneof![Just(0.0), 0.1..0.9_f64],
    ) {
        let rows = if constant { 1 } else { n };
        let feedback = (0..rows * bands).map(|i| if i % bands == 0 { 1.0 + entries[i] } else { entries[i] });
        let scale = (0..n).map(|t| 1.0 + entries[71 - t]).collect();
        let banded = Banded::new(bands, feedback.collect(), scale).unwrap().rounded().unwrap();
        let (coloring, encoder) = (banded.coloring(), banded.encoder());
        prop_assert!((&coloring * &encoder - Mat::<f64>::identity(n, n)).norm_max() < 1e-10);
        for (j, bound) in banded.encoder_column_norms_sq().into_iter().enumerate() {
            let exact = encoder.col(j).squared_norm_l2();
            prop_assert!(bound >= exact && bound < exact * (1.0 + 1e-13));
        }
        let optimizer = Optimizer { momentum, ..Default::default() };
        let workload = Workload::sgd(vec![0.5; n], optimizer).unwrap();
        let decoder = workload.to_dense() * &coloring;
        for (i, norm) in banded.decoder_row_norms_sq(&workload).into_iter().enumerate() {
            let exact = decoder.row(i).squared_norm_l2();
            prop_assert!((norm - exact).abs() < 1e-10 * exact, "{norm} {exact}");
        }
        let mut tensors = Tensors::default();
        banded.write(&mut tensors);
        prop_assert_eq!(Banded::read(n, &mut tensors).unwrap(), banded);
    }
}
