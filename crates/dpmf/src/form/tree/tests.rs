use super::*;
use crate::workload::{Average, Optimizer};
use faer::Side;
use faer::linalg::solvers::DenseSolveCore;
use proptest::prelude::*;

const DECODERS: [Decoder; 3] = [Decoder::Binary, Decoder::HonakerOnline, Decoder::HonakerFull];

fn coloring(tree: &Tree) -> Mat<f64> {
    let mut rows = tree.coloring_rows();
    let mut n = Mat::zeros(tree.steps(), tree.noise_rows());
    for i in 0..tree.steps() {
        let mut row = vec![0.0; tree.noise_rows()];
        rows(&mut row);
        row.iter().enumerate().for_each(|(j, &x)| n[(i, j)] = x);
    }
    n
}

fn decoder(tree: &Tree) -> Mat<f64> {
    Workload::prefix_sum(tree.steps()).unwrap().to_dense() * coloring(tree)
}

fn distance(a: &Mat<f64>, b: &Mat<f64>) -> f64 {
    assert_eq!(a.shape(), b.shape());
    (a - b).norm_max()
}

fn total_loss(n: usize, decoder: Decoder) -> f64 {
    let tree = Tree::new(n, decoder).unwrap();
    let rows = tree.decoder_row_norms_sq(&Workload::prefix_sum(n).unwrap());
    let sensitivity_sq = tree.encoder_column_norms_sq().into_iter().fold(0.0, f64::max);
    sensitivity_sq * rows.iter().sum::<f64>()
}

fn online_with(n: usize, seed: &[(f64, f64)]) -> Tree {
    let leaf = Level { own: 0.9, below: 0.0 };
    let others = (0..n.ilog2() as usize).map(|k| Level { own: seed[k].0, below: seed[k].1 });
    let levels = std::iter::once(leaf).chain(others).collect();
    Tree::from_levels(n, Decoder::HonakerOnline, levels).unwrap()
}

#[test]
fn one_two_and_three_steps() {
    for decoder in DECODERS {
        let one = Tree::new(1, decoder).unwrap();
        assert_eq!((one.steps(), one.noise_rows()), (1, 1));
        assert_eq!(coloring(&one)[(0, 0)], 1.0);
        assert_eq!(one.encoder()[(0, 0)], 1.0);
        assert_eq!(one.encoder_column_norms_sq(), [1.0]);
    }
    // Nodes: leaf 1, leaf 2, their parent, leaf 3.
    let thirds = |rows: [[f64; 4]; 3]| Mat::from_fn(3, 4, |i, j| rows[i][j] / 3.0);
    let expected = [
        thirds([[3.0, 0.0, 0.0, 0.0], [-3.0, 0.0, 3.0, 0.0], [0.0, 0.0, 0.0, 3.0]]),
        thirds([[3.0, 0.0, 0.0, 0.0], [-2.0, 1.0, 2.0, 0.0], [0.0, 0.0, 0.0, 3.0]]),
        thirds([[2.0, -1.0, 1.0, 0.0], [-1.0, 2.0, 1.0, 0.0], [0.0, 0.0, 0.0, 3.0]]),
    ];
    for (decoder, expected) in DECODERS.into_iter().zip(&expected) {
        let tree = Tree::new(3, decoder).unwrap();
        assert!(distance(&coloring(&tree), expected) < 1e-15, "{decoder:?}");
        assert_eq!(tree.encoder_column_norms_sq(), [2.0, 2.0, 1.0]);
    }
}

#[test]
fn honaker_rows_equal_the_reference() {
    // From the closed form of the estimators; see golden/PROVENANCE.md.
    let b = decoder(&Tree::new(4, Decoder::HonakerOnline).unwrap());
    let last = [1.0, 1.0, 2.0, 1.0, 1.0, 2.0, 4.0];
    let second = [1.0, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0];
    for j in 0..7 {
        assert!((b[(3, j)] - last[j] / 7.0).abs() < 1e-15);
        assert!((b[(1, j)] - second[j] / 3.0).abs() < 1e-15);
    }
    let b = decoder(&Tree::new(2, Decoder::HonakerFull).unwrap());
    let full = [[2.0, -1.0, 1.0], [1.0, 1.0, 2.0]];
    for i in 0..2 {
        for j in 0..3 {
            assert!((b[(i, j)] - full[i][j] / 3.0).abs() < 1e-15);
        }
    }
}

#[test]
fn losses_equal_the_reference() {
    // Binary, online, full; see golden/PROVENANCE.md.
    let golden = [
        (4, [15.0, 11.7142857, 7.7142857]),
        (16, [165.0, 113.437788, 60.1044547]),
        (64, [1351.0, 853.7182401, 405.7182401]),
    ];
    for (n, losses) in golden {
        for (decoder, loss) in DECODERS.into_iter().zip(losses) {
            assert!((total_loss(n, decoder) - loss).abs() < 1e-7 * loss, "{n} {decoder:?}");
        }
    }
    // Odd sizes, printed to the digits shown; 6 by hand is 141/7.
    assert!((total_loss(6, Decoder::HonakerOnline) - 141.0 / 7.0).abs() < 1e-12);
    assert!((total_loss(100, Decoder::HonakerOnline) - 1394.0).abs() < 0.5);
}

#[test]
fn honaker_column_of_the_paper() {
    // Table 3 of [DMRST22], √L of Honaker online.
    for (n, root) in [(256, 74.4), (512, 116.5), (1024, 180.8), (2048, 278.3), (4096, 425.6)] {
        assert!((total_loss(n, Decoder::HonakerOnline).sqrt() - root).abs() < 0.05, "{n}");
    }
}

#[test]
fn full_estimator_is_the_pseudo_inverse() {
    for n in 1..=16 {
        let tree = Tree::new(n, Decoder::HonakerFull).unwrap();
        let pseudo_inverse = tree.encoder().svd().unwrap().pseudoinverse();
        assert!(distance(&coloring(&tree), &pseudo_inverse) < 1e-13, "{n}");
    }
}

#[test]
fn online_rows_are_the_constrained_pseudo_inverse() {
    // The best row i of B on the nodes that are complete by step i: the last row of S_i C_i⁺.
    for n in 1..=16 {
        let tree = Tree::new(n, Decoder::HonakerOnline).unwrap();
        let (b, c) = (decoder(&tree), tree.encoder());
        for i in 0..n {
            let m = nodes_within(i + 1);
            let inverse = c.submatrix(0, 0, m, i + 1).svd().unwrap().pseudoinverse();
            for j in 0..tree.noise_rows() {
                let best = if j < m { (0..=i).map(|k| inverse[(k, j)]).sum() } else { 0.0 };
                assert!((b[(i, j)] - best).abs() < 1e-13, "n = {n}, row {i}, node {j}");
            }
        }
    }
}

#[test]
fn lower_triangular_form_is_the_cholesky_factor() {
    for n in [1, 2, 3, 4, 7, 8, 13, 64, 100] {
        let tree = Tree::new(n, Decoder::HonakerFull).unwrap();
        let c = tree.encoder();
        let inverse = (c.transpose() * &c).llt(Side::Lower).unwrap().inverse();
        let factor = inverse.llt(Side::Lower).unwrap().L().to_owned();
        assert!(distance(&tree.to_lower_triangular().unwrap(), &factor) < 1e-13, "{n}");
    }
}

#[test]
fn prefix_sum_rows_have_the_closed_form() {
    // Row i: the variances of the estimates of the nodes in the binary expansion of i.
    let n = 1000;
    let tree = Tree::new(n, Decoder::HonakerOnline).unwrap();
    let mut variances = vec![1.0];
    for k in 0..9 {
        variances.push(1.0 / (1.0 + 1.0 / (2.0 * variances[k])));
    }
    for (i, row) in tree.decoder_row_norms_sq(&Workload::prefix_sum(n).unwrap()).iter().enumerate() {
        let exact: f64 = (0..10).filter(|k| (i + 1) >> k & 1 == 1).map(|k| variances[k]).sum();
        assert!((row - exact).abs() < 1e-12 * exact);
    }
}

#[test]
fn a_hundred_thousand_steps_with_momentum() {
    let n = 100_000;
    let tree = Tree::new(n, Decoder::HonakerOnline).unwrap();
    let optimizer = Optimizer { momentum: 0.9, ..Default::default() };
    let rows = tree.decoder_row_norms_sq(&Workload::sgd(vec![1.0; n], optimizer).unwrap());
    assert_eq!(rows.len(), n);
    // u_i reaches the last iterate with weight 1 + 0.9 + … + 0.9^{n−1−i}.
    let weight = |i: usize| (1.0 - 0.9_f64.powf((n - i) as f64)) / 0.1;
    // Backwards through the stream: what one unit of each live estimate sends into the output.
    let mut live = [0.0_f64; 20];
    let mut exact = 0.0;
    for i in (0..n).rev() {
        let top = (i + 1).trailing_zeros() as usize;
        let mut sent = weight(i) + std::mem::take(&mut live[top]);
        for k in (0..top).rev() {
            let Level { own, below } = tree.levels()[k + 1];
            exact += (own * sent) * (own * sent);
            sent *= below;
            live[k] = sent - weight(i);
        }
        exact += sent * sent;
    }
    assert!((rows[n - 1] - exact).abs() < 1e-9 * exact, "{} {exact}", rows[n - 1]);
}

#[test]
fn cost_counts_what_is_kept() {
    let cost = |n, decoder| Tree::new(n, decoder).unwrap().cost();
    for (n, buffers) in [(1, 0), (2, 1), (3, 1), (4, 2), (100, 6), (256, 8), (4096, 12)] {
        assert_eq!(cost(n, Decoder::Binary).buffers, Some(buffers));
        assert_eq!(cost(n, Decoder::HonakerOnline).buffers, Some(buffers));
        // Estimates alive after step i whose parent still completes within n steps.
        let kept = |i: usize| (0..20).filter(|k| i >> k & 1 == 1 && ((i >> k) + 1) << k <= n).count();
        assert_eq!((1..n).map(kept).max().unwrap_or(0), buffers);
    }
    assert_eq!(cost(4, Decoder::Binary).work, 7.0 / 4.0);
    assert_eq!(cost(4, Decoder::HonakerOnline).work, 13.0 / 4.0);
    assert_eq!(cost(4, Decoder::HonakerFull), Cost::dense(7.0));
    assert_eq!(cost(3, Decoder::HonakerFull).work, 7.0 / 3.0);
}

#[test]
fn rounding_leaves_the_encoder_exact() {
    for n in [1, 2, 100, 1 << 20] {
        let tree = Tree::new(n, Decoder::HonakerOnline).unwrap();
        let rounded = tree.rounded().unwrap();
        for (level, exact) in rounded.levels().iter().zip(tree.levels()) {
            assert_eq!(f64::from(level.own as f32), level.own);
            assert_eq!(f64::from(level.below as f32), level.below);
            assert_eq!(level.own + level.below, 1.0);
            assert!((level.own - exact.own).abs() <= 3e-8);
        }
        assert_eq!(rounded.rounded().unwrap(), rounded);
        assert_eq!(rounded.encoder_column_norms_sq(), tree.encoder_column_norms_sq());
    }
}

#[test]
fn bad_input_is_refused() {
    assert!(Tree::new(0, Decoder::Binary).is_err());
    assert!(Tree::new(usize::MAX, Decoder::Binary).is_err());
    let full = Tree::new(4, Decoder::HonakerFull).unwrap();
    assert_eq!(full.rounded().unwrap_err().kind(), "unsupported");
    assert!(full.prefix_sum_row(0).is_err());
    let online = Tree::new(4, Decoder::HonakerOnline).unwrap();
    assert!(online.prefix_sum_row(4).is_err());
    assert!(online.to_lower_triangular().is_err());
    let with = |own, below| {
        let levels = vec![Level { own: 1.0, below: 0.0 }, Level { own, below }];
        Tree::from_levels(2, Decoder::HonakerOnline, levels)
    };
    assert!(with(0.5, 0.5).is_ok());
    for (own, below) in [(0.0, 0.5), (-1.0, 0.5), (f64::NAN, 0.5), (0.5, f64::INFINITY), (0.5, 1.0)] {
        assert!(with(own, below).is_err(), "{own} {below}");
    }
    let levels = vec![Level { own: 1.0, below: 0.1 }];
    assert!(Tree::from_levels(1, Decoder::Binary, levels.clone()).is_err());
    assert!(Tree::from_levels(2, Decoder::Binary, levels).is_err());
}

pub(crate) fn any_workload() -> impl Strategy<Value = Workload> {
    let average =
        prop_oneof![Just(Average::None), Just(Average::Uniform), (0.0..0.95).prop_map(Average::Ema)];
    let momentum = prop_oneof![Just(0.0), 0.1..0.95];
    let eta = prop::collection::vec(0.05..2.0_f64, 1..70);
    (eta, momentum, any::<bool>(), prop_oneof![Just(0.0), 0.01..0.4], any::<bool>(), average).prop_map(
        |(eta, momentum, nesterov, weight_decay, coupled, average)| {
            let optimizer = Optimizer {
                momentum,
                nesterov: nesterov && momentum > 0.0,
                weight_decay,
                coupled: coupled && weight_decay > 0.0,
                average,
            };
            Workload::sgd(eta, optimizer).unwrap()
        },
    )
}

proptest! {
    #[test]
    fn coloring_inverts_the_encoder(
        n in 1_usize..90,
        seed in prop::collection::vec((0.2..1.5_f64, -0.5..0.9_f64), 7),
    ) {
        let trees = DECODERS.map(|decoder| Tree::new(n, decoder).unwrap());
        for tree in trees.iter().chain([&online_with(n, &seed), &online_with(n, &seed).rounded().unwrap()]) {
            let c = tree.encoder();
            let product = coloring(tree) * &c;
            prop_assert!(distance(&product, &Mat::identity(n, n)) < 1e-11, "{:?}", tree);
            for (j, norm) in tree.encoder_column_norms_sq().into_iter().enumerate() {
                let exact = c.col(j).squared_norm_l2();
                prop_assert!((norm - exact).abs() < 1e-14 * exact, "column {}: {} {}", j, norm, exact);
            }
        }
        prop_assert_eq!(trees[0].encoder_column_norms_sq()[0], f64::from(n.ilog2() + 1));
    }

    #[test]
    fn sparse_rows_are_the_matrix(n in 1_usize..70, seed in prop::collection::vec((0.2..1.5_f64, -0.5..0.9_f64), 7)) {
        let binary = Tree::new(n, Decoder::Binary).unwrap();
        let online = Tree::new(n, Decoder::HonakerOnline).unwrap();
        for tree in [&binary, &online, &online_with(n, &seed)] {
            let b = decoder(tree);
            for i in 0..n {
                let mut row = vec![0.0; tree.noise_rows()];
                let mut next = 0;
                for (node, weight) in tree.prefix_sum_row(i).unwrap() {
                    prop_assert!(node >= next);
                    next = node + 1;
                    row[node] = weight;
                }
                for (j, x) in row.iter().enumerate() {
                    prop_assert!((x - b[(i, j)]).abs() < 1e-12);
                }
            }
        }
        for i in 0..n {
            prop_assert_eq!(binary.prefix_sum_row(i).unwrap().count(), (i + 1).count_ones() as usize);
        }
    }

    #[test]
    fn fast_row_norms_equal_dense_rows(
        workload in any_workload(),
        seed in prop::collection::vec((0.2..1.5_f64, -0.5..0.9_f64), 7),
    ) {
        let n = workload.steps();
        let trees = DECODERS.map(|decoder| Tree::new(n, decoder).unwrap());
        for tree in trees.iter().chain([&online_with(n, &seed)]) {
            let b = workload.to_dense() * coloring(tree);
            let dense = Workload::dense(workload.to_dense()).unwrap();
            for (i, (fast, slow)) in
                tree.decoder_row_norms_sq(&workload).into_iter().zip(tree.decoder_row_norms_sq(&dense)).enumerate()
            {
                let exact = b.row(i).squared_norm_l2();
                prop_assert!((fast - exact).abs() < 1e-9 * exact, "{:?} row {}: {} {}", tree, i, fast, exact);
                prop_assert!((slow - exact).abs() < 1e-9 * exact);
            }
        }
    }
}

#[test]
fn a_matrix_that_does_not_fit_is_an_error() {
    let full = Tree::new(1_000_000, Decoder::HonakerFull).unwrap();
    assert!(matches!(full.to_lower_triangular(), Err(Error::Unsupported { .. })));
    assert!(matches!(full.deployed(), Err(Error::Unsupported { .. })));
}
