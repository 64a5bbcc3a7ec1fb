use super::*;
use crate::form::{Dense, StateSpace, Toeplitz, Tree, tree};
use crate::participation::Participation;
use proptest::prelude::*;

fn gamma_sq(form: &dyn Representation, text: &str) -> f64 {
    text.parse::<Participation>().unwrap().sensitivity(form).unwrap().gamma.powi(2)
}

fn lower(n: usize, entries: &[f64]) -> Dense {
    let entry = |i: usize, j: usize| entries[(i * n + j) % entries.len()];
    let coloring = Mat::from_fn(n, n, |i, j| match i.cmp(&j) {
        std::cmp::Ordering::Less => 0.0,
        std::cmp::Ordering::Equal => 1.0 + entry(i, j).abs(),
        std::cmp::Ordering::Greater => entry(i, j),
    });
    Dense::from_coloring(coloring).unwrap()
}

#[test]
fn one_two_and_three_steps_in_closed_form() {
    let close = |a: f64, b: f64| assert!(a >= b && a < b * (1.0 + 1e-13), "{a} {b}");
    close(gamma_sq(&lower(1, &[1.0]), "min-separation:1:5"), 0.25);
    // C = [[1, 0], [a, 1]]: ‖c_0 ± c_1‖² = 2 + a² ± 2a, and the worse sign counts.
    for a in [0.5, -0.5] {
        let two = Dense::from_coloring(Mat::from_fn(2, 2, |i, j| [[1.0, 0.0], [-a, 1.0]][i][j])).unwrap();
        close(gamma_sq(&two, "epochs:2"), 3.25);
        close(gamma_sq(&two, "min-separation:1"), 3.25);
        assert!("epochs:2".parse::<Participation>().unwrap().sensitivity(&two).unwrap().exact);
    }
    // c = 1, 1/2, 3/8: users at steps 0 and 2, or at 1 alone.
    let three = Toeplitz::sqrt_prefix_sum(3).unwrap();
    let x = [1.0 + 0.25 + 9.0 / 64.0, 0.5 + 3.0 / 16.0, 3.0 / 8.0];
    close(gamma_sq(&three, "epochs:2"), x[0] + 1.0 + 2.0 * x[2]);
    close(gamma_sq(&three, "min-separation:2"), x[0] + 1.0 + 2.0 * x[2]);
    close(gamma_sq(&three, "min-separation:1:2"), x[0] + 1.25 + 2.0 * x[1]);
    close(gamma_sq(&three, "epochs:3"), x[0] + 1.25 + 1.0 + 2.0 * (x[1] + 0.5 + x[2]));
}

#[test]
fn independent_noise_adds_up_in_squares() {
    let form = StateSpace::independent(600).unwrap();
    for (text, times) in [("epochs:6", 6.0), ("min-separation:7", 86.0), ("epochs:600", 600.0)] {
        let found = text.parse::<Participation>().unwrap().sensitivity(&form).unwrap();
        // Every one of K² inner products of 600 terms is allowed its rounding.
        let room = 1.0 + 4.0 * 600.0 * times * f64::EPSILON;
        assert!(found.exact && (times..times * room).contains(&found.gamma.powi(2)), "{text}: {found:?}");
    }
}

/// Two columns that agree but for their sign: with scalars that all point one way they would cancel.
#[test]
fn opposite_columns_do_not_cancel() {
    let coloring = Mat::from_fn(2, 2, |i, j| [[1.0, 0.0], [1.0, 1e-3]][i][j]);
    let form = Dense::from_coloring(coloring).unwrap();
    assert!(gamma_sq(&form, "epochs:2") > 3.9e6);
}

/// All patterns of at most eight steps that keep the distance.
fn patterns(n: usize, separation: usize, times: usize) -> Vec<Vec<usize>> {
    (1_u32..1 << n)
        .map(|set| (0..n).filter(|i| set >> i & 1 == 1).collect::<Vec<usize>>())
        .filter(|steps| steps.len() <= times && steps.windows(2).all(|pair| pair[1] - pair[0] >= separation))
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// No signs and no vectors at the steps of any pattern change more than the sensitivity says.
    #[test]
    fn brute_force(
        n in 1..9_usize,
        entries in prop::collection::vec(-1.0..1.0_f64, 41),
        separation in 1..5_usize,
        times in 1..5_usize,
        vectors in prop::collection::vec(-1.0..1.0_f64, 24),
    ) {
        let form = lower(n, &entries);
        let encoder = form.encoder();
        let x = encoder.transpose() * &encoder;
        let bound = gamma_sq(&form, &format!("min-separation:{separation}:{times}"));
        let unit = |i: usize| {
            let v = &vectors[3 * i..][..3];
            let norm = v.iter().map(|x| x * x).sum::<f64>().sqrt().max(1e-9);
            [v[0] / norm, v[1] / norm, v[2] / norm]
        };
        let change = |steps: &[usize], inner: &dyn Fn(usize, usize) -> f64| -> f64 {
            steps.iter().flat_map(|i| steps.iter().map(|j| x[(*i, *j)] * inner(*i, *j))).sum()
        };
        let mut largest = 0.0_f64;
        for steps in patterns(n, separation, times) {
            for signs in 0_u32..1 << steps.len() {
                let sign = |i: usize| {
                    let place = steps.iter().position(|s| *s == i).unwrap();
                    if signs >> place & 1 == 1 { -1.0 } else { 1.0 }
                };
                largest = largest.max(change(&steps, &|i, j| sign(i) * sign(j)));
            }
            let dot = |i: usize, j: usize| unit(i).iter().zip(unit(j)).map(|(a, b)| a * b).sum();
            largest = largest.max(change(&steps, &dot));
        }
        prop_assert!(bound >= largest * (1.0 - 1e-12), "{} {}", bound, largest);
        if times == 1 || separation >= n {
            prop_assert!(bound <= largest * (1.0 + 1e-9), "{} {}", bound, largest);
        }
        for epochs in (1..=times).filter(|epochs| *epochs <= n) {
            let b = n.div_ceil(epochs);
            let largest = (0..b)
                .map(|p| change(&(p..n).step_by(b).collect::<Vec<_>>(), &|i, j| x[(i, j)].signum()))
                .fold(0.0, f64::max);
            let found = gamma_sq(&form, &format!("epochs:{epochs}"));
            prop_assert!((found / largest - 1.0).abs() < 1e-9, "{} {}", found, largest);
            let separated = gamma_sq(&form, &format!("min-separation:{b}"));
            prop_assert!(separated >= found * (1.0 - 1e-12), "{} {}", separated, found);
        }
    }

    #[test]
    fn sums_so_far_end_at_the_sensitivity(
        n in 1..9_usize,
        entries in prop::collection::vec(-1.0..1.0_f64, 41),
        text in prop_oneof![Just("epochs:1"), Just("epochs:3"), Just("min-separation:2"), Just("min-separation:3:2")],
    ) {
        let (form, participation) = (lower(n, &entries), text.parse::<Participation>().unwrap());
        prop_assume!(participation.pattern(n).is_ok());
        let (total, spent) =
            (participation.sensitivity(&form).unwrap().gamma, participation.sensitivities(&form).unwrap());
        prop_assert!(spent.is_sorted() && spent[n - 1] <= total);
        prop_assert!(spent[n - 1] >= total * (1.0 - 1e-9), "{} {}", spent[n - 1], total);
        let encoder = form.encoder();
        prop_assert!(spent[0] >= encoder[(0, 0)] * (1.0 - 1e-12));
    }
}

/// A Toeplitz encoder that does not increase, and one whose band is below the separation: both are exact.
#[test]
fn exact_where_it_is_known_to_be() {
    let exact = |form: &dyn Representation, text: &str| {
        text.parse::<Participation>().unwrap().sensitivity(form).unwrap().exact
    };
    let root = Toeplitz::sqrt_prefix_sum(300).unwrap();
    assert!(
        exact(&root, "min-separation:40") && exact(&root, "min-separation:40:3") && exact(&root, "epochs:7")
    );
    let coloring: Vec<f64> = (0..50).map(|k| (-0.5_f64).powi(k)).collect();
    let banded = Toeplitz::new(coloring).unwrap();
    assert!(exact(&banded, "min-separation:5"));
}

/// Inner products that a form knows, and those of its columns, give one sensitivity.
#[test]
fn known_products_change_nothing() {
    let coloring: Vec<f64> = (0..90).map(|k| 0.9_f64.powi(k) * (2.0 * f64::from(k)).cos()).collect();
    let toeplitz = Toeplitz::new(coloring).unwrap();
    let dense = Dense::from_coloring(Representation::coloring(&toeplitz)).unwrap();
    for text in
        ["epochs:2", "epochs:7", "epochs:90", "min-separation:1:3", "min-separation:9", "min-separation:20:4"]
    {
        let participation: Participation = text.parse().unwrap();
        let [a, b] =
            [&toeplitz as &dyn Representation, &dense].map(|form| participation.sensitivity(form).unwrap());
        assert!((a.gamma / b.gamma - 1.0).abs() < 1e-11, "{text}: {a:?} {b:?}");
    }
}

/// Patterns and tiles that do not fit each other, against one sum over the dense matrix.
#[test]
fn long_patterns_are_summed_tile_by_tile() {
    let tree = Tree::new(700, tree::Decoder::HonakerOnline).unwrap();
    let encoder = tree.encoder();
    let x = encoder.transpose() * &encoder;
    let all: f64 = (0..700).flat_map(|i| (0..700).map(move |j| (i, j))).map(|at| x[at].abs()).sum();
    for text in ["epochs:700", "min-separation:1"] {
        let found = gamma_sq(&tree, text);
        assert!(found >= all && found < all * (1.0 + 1e-9), "{text}: {found} {all}");
    }
}

#[test]
fn what_rounding_hides_is_infinite() {
    let (a, b) = (2f64.powi(40), 2f64.powi(80));
    let rows = [[1.0, 0.0, 0.0, 0.0], [-a, a, 0.0, 0.0], [-b, 0.0, b, 0.0], [-b, 2f64.powi(20), b, 1.0]];
    let dense = Dense::from_coloring(Mat::from_fn(4, 4, |i, j| rows[i][j])).unwrap();
    assert!(gamma_sq(&dense, "epochs:2") >= a);
    assert!(gamma_sq(&dense, "min-separation:2") >= a);

    // The inverse series of 1/(1 − x³ − 2²⁰x⁵) in f32 is not the polynomial that f64 takes it for.
    let mut coloring = vec![0.0; 34];
    coloring[0] = 1.0;
    for k in 1..34 {
        let back = |by: usize| if k >= by { coloring[k - by] } else { 0.0 };
        coloring[k] = back(3) + 2f64.powi(20) * back(5);
    }
    let toeplitz = Toeplitz::new(coloring.into_iter().map(|x| f64::from(x as f32)).collect()).unwrap();
    for text in ["epochs:2", "epochs:34", "min-separation:2", "min-separation:10:2"] {
        assert_eq!(gamma_sq(&toeplitz, text), f64::INFINITY, "{text}");
    }
}
