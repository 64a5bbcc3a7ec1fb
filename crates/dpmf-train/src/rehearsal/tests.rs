use super::tables::Rows;
use super::*;
use crate::data::{Samples, Target};
use crate::model::{Logistic, Model, Regressor};
use crate::plan::Secret;
use crate::recipe::PlanLimits;
use crate::{Local, Training, Users};
use dpmf::Optimizer;
use dpmf::planner::silent;

fn shape(users: usize, numbers: usize, categories: &[usize], classes: Option<usize>) -> Shape {
    Shape { users, numbers, categories: categories.to_vec(), words: Vec::new(), classes, hidden: Vec::new() }
}

fn settings(users: usize, mechanism: &str, epsilon: f64) -> Settings {
    let mut settings = crate::recipe::tests::settings(mechanism);
    settings.recipe.local = Local::Gradient;
    settings.optimizer = Optimizer::default();
    settings.limits = PlanLimits { epochs: Some(4), ..PlanLimits::new(users) };
    settings.privacy = Privacy::Epsilon { epsilon, delta: 1e-6 };
    settings
}

fn rehearsed(shape: &Shape, settings: &Settings, given: Given) -> Rehearsed {
    rehearse(shape, settings, given, &mut RunPlanner::default(), None, &mut silent).unwrap()
}

/// Closed gaps on tables that no rehearsal sees, with the noise of the plan: one for each table and draw.
fn fresh(shape: &Shape, settings: &Settings, found: &Rehearsed, tables: usize, draws: usize) -> Vec<f64> {
    let mut settings = settings.clone();
    found.apply(&mut settings, Given::default());
    let turns = Turns {
        epochs: found.epochs,
        turns: per_epoch(shape.users, found.clients),
        clients: found.clients,
        free: true,
    };
    let stage = Stage {
        shape,
        settings: &settings,
        turns: vec![turns],
        tables: Vec::new(),
        parameters: (shape.features() + 1) * shape.outputs(),
    };
    let noise = stage.planned(0, &mut RunPlanner::default(), &mut silent).unwrap();
    let workload = settings.workload().unwrap();
    let mut gaps = Vec::new();
    for index in 0..tables {
        let table = MadeUp::new(shape, shape.users, 100 * TABLES + index);
        for draw in 0..draws {
            let noise = stage.noise(&noise, settings.rounds, 50 + index, draw).unwrap();
            let course = Course { workload: &workload, turns: turns.turns, clip: found.clip, noise: &noise };
            gaps.push(closed_gap(shape, &table, &course));
        }
    }
    gaps
}

fn samples<T: Target>(rows: &Rows, width: usize, target: fn(f32) -> T) -> Samples<T> {
    let mut samples = Samples::new(width);
    for (features, value) in rows.features.chunks_exact(width).zip(&rows.targets) {
        samples.push(features, target(*value));
        samples.finish_user();
    }
    samples
}

/// What a training of the program makes of a table, without noise.
fn trained<M, D>(model: &M, data: &D, settings: &Settings) -> Vec<f32>
where
    M: Model,
    D: Users<Domain = M::Domain>,
{
    let plan = RunPlanner::default().plan(settings, &mut silent).unwrap();
    let secret = Secret { key: NoiseKey::from_seed(0), run: RunId::from_label("test") };
    let cohorts = plan.cohorts(data.users(), &secret).unwrap();
    let mut training = Training::new(model, data, &plan, cohorts, None).unwrap();
    while training.advance().unwrap() {}
    training.released().to_vec()
}

#[test]
fn a_student_learns_what_a_training_of_the_program_learns() {
    for classes in [Some(3), None] {
        let shape = shape(150, 5, &[3], classes);
        let table = MadeUp::new(&shape, 150, 1);
        let mut settings = settings(150, "none", 1.0);
        Turns { epochs: 12, turns: 1, clients: 150, free: true }.apply(&mut settings);
        (settings.clip, settings.server_learning_rate) = (1.1, 0.4);
        let workload = settings.workload().unwrap();
        let course = Course { workload: &workload, turns: 1, clip: settings.clip, noise: &[] };
        let width = shape.features();
        let outputs = match classes {
            Some(classes) => {
                let model = Logistic { features: width, classes };
                let parameters = trained(&model, &samples(&table.train, width, |y| y as u16), &settings);
                model.logits(&parameters, &table.test.features)
            }
            None => {
                let model = Regressor { features: width, hidden: Vec::new() };
                let parameters = trained(&model, &samples(&table.train, width, |y| y), &settings);
                model.values(&parameters, &table.test.features)
            }
        };
        let (own, program) = (closed_gap(&shape, &table, &course), table.closed_gap(classes, &outputs));
        // The program's linear model starts near zero, not at it.
        assert!((own - program).abs() < 0.02, "{classes:?}: {own} {program}");
        assert!(own > 0.3, "{own}");
        let slower = Settings { server_learning_rate: 0.04, ..settings.clone() }.workload().unwrap();
        let other = closed_gap(&shape, &table, &Course { workload: &slower, ..course });
        assert!((own - other).abs() > 0.02, "power: {own} {other}");
    }
}

#[test]
fn made_up_tables_have_the_sizes_and_the_difficulty_that_was_asked_for() {
    let shape = Shape { words: vec![16], ..shape(400, 4, &[3, 5], Some(3)) };
    assert_eq!(shape.features(), 4 + 3 + 5 + 16);
    for index in 0..TABLES {
        let table = MadeUp::new(&shape, 400, index);
        assert_eq!(table.train.features.len(), 400 * shape.features());
        for row in table.train.features.chunks_exact(shape.features()) {
            let one_hot = [&row[4..7], &row[7..12]].map(|values| values.iter().sum::<f32>());
            assert_eq!(one_hot, [1.0, 1.0]);
            assert!((row[12..].iter().map(|x| x * x).sum::<f32>() - 1.0).abs() < 1e-5);
        }
        assert!(table.train.targets.iter().all(|class| [0.0, 1.0, 2.0].contains(class)));
        assert!(table.optimum > table.trivial + 0.02, "{index}: {} {}", table.trivial, table.optimum);
    }
    // Easy, middling, hard: what the teacher leaves unexplained.
    let numbers = Shape { classes: None, ..shape };
    for (index, explained) in [0.9, 0.6, 0.3, 0.9, 0.6, 0.3].into_iter().enumerate() {
        let table = MadeUp::new(&numbers, 400, index);
        let left = (table.optimum / table.trivial).powi(2);
        assert!((1.0 - left - explained).abs() < 0.12, "{index}: {left}");
    }
}

#[test]
fn what_is_given_stays_and_the_rest_is_found() {
    let shape = shape(240, 4, &[], None);
    let mut base = settings(240, "independent", 3.0);
    (base.server_learning_rate, base.clip) = (0.3, 0.7);
    let all = Given { learning_rate: true, length: true, clients: true, clip: true };
    assert!(all.everything() && !Given { clip: false, ..all }.everything());
    let found = rehearsed(&shape, &base, Given { learning_rate: true, clip: true, ..Given::default() });
    assert_eq!((found.learning_rate, found.clip), (0.3, 0.7));
    assert_eq!(found.clients, 240);
    // A length by epochs leaves the cohort; rounds and a cohort leave nothing of both.
    let mut epochs = base.clone();
    epochs.limits.epochs = Some(4);
    let found = rehearsed(&shape, &epochs, Given { length: true, ..Given::default() });
    let mut applied = epochs.clone();
    found.apply(&mut applied, Given { length: true, ..Given::default() });
    assert_eq!((found.epochs, applied.limits.epochs), (4, Some(4)));
    assert_eq!(applied.rounds, 4 * per_epoch(240, found.clients));
    let mut rounds = settings(240, "optimal", 3.0);
    (rounds.rounds, rounds.recipe.clients, rounds.limits.epochs) = (10, 20, None);
    let given = Given { length: true, clients: true, ..Given::default() };
    let mut applied = rounds.clone();
    rehearsed(&shape, &rounds, given).apply(&mut applied, given);
    assert_eq!((applied.rounds, applied.recipe.clients), (10, 20));
    assert_ne!(applied.server_learning_rate, rounds.server_learning_rate);
}

#[test]
fn a_rehearsal_is_found_again_by_all_that_decides_it() {
    let folder = tempfile::tempdir().unwrap();
    let shape = shape(120, 3, &[], Some(2));
    let ask = |epsilon| {
        let settings = settings(120, "independent", epsilon);
        let mut planner = RunPlanner::default();
        rehearse(&shape, &settings, Given::default(), &mut planner, Some(folder.path()), &mut silent).unwrap()
    };
    let first = ask(2.0);
    // The time tells that it was read: it would not come out the same.
    assert_eq!(ask(2.0), first);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    ask(0.5);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    for entry in std::fs::read_dir(folder.path()).unwrap() {
        std::fs::write(entry.unwrap().path(), "{}").unwrap();
    }
    let again = ask(2.0);
    assert_eq!(Rehearsed { seconds: first.seconds, ..again }, first);
}

/// Mean and standard error.
fn estimate(values: &[f64]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (count - 1.0);
    (mean, (variance / count).sqrt())
}

/// More ε is never worse beyond two standard errors of the difference, on tables that no rehearsal saw.
#[test]
fn a_larger_epsilon_gives_no_worse_a_model() {
    for shape in [shape(160, 10, &[], None), shape(300, 6, &[4], Some(3))] {
        let gaps: Vec<Vec<f64>> = [0.3, 1.0, 3.0, 8.0]
            .into_iter()
            .map(|epsilon| {
                let settings = settings(shape.users, "independent", epsilon);
                let found = rehearsed(&shape, &settings, Given::default());
                fresh(&shape, &settings, &found, 2 * TABLES, 3)
            })
            .collect();
        for pair in gaps.windows(2) {
            let differences: Vec<f64> =
                pair[1].iter().zip(&pair[0]).map(|(more, less)| more - less).collect();
            let (mean, error) = estimate(&differences);
            assert!(mean > -2.0 * error, "{shape:?}: {mean} ± {error}");
        }
        // Power: the other way round it is worse, by far more.
        let back: Vec<f64> = gaps[0].iter().zip(&gaps[3]).map(|(less, more)| less - more).collect();
        let (mean, error) = estimate(&back);
        assert!(mean < -4.0 * error, "{shape:?}: {mean} ± {error}");
    }
}

#[test]
fn a_large_model_gets_a_smaller_rate_where_noise_is_longer() {
    let mut settings = settings(10_000, "optimal", 2.0);
    (settings.recipe.clients, settings.limits.epochs, settings.server_learning_rate) = (100, Some(1), 0.25);
    let rate = |settings: &Settings, parameters| tempered_rate(settings, parameters).unwrap();
    assert_eq!(rate(&settings, 10_000), 0.25);
    // Four times the parameters, twice the norm; four times the epochs as well.
    let large = rate(&settings, 1_000_000);
    assert!(large < 0.25 && (rate(&settings, 4_000_000) / large - 0.5).abs() < 1e-12);
    settings.limits.epochs = Some(4);
    assert!((rate(&settings, 1_000_000) / large - 0.5).abs() < 1e-12);
    settings.recipe.mechanism = MechanismChoice::None;
    assert_eq!(rate(&settings, 1_000_000), 0.25);
}

/// What is found of a table may change the rate of its plan, and nothing that privacy rests on.
#[test]
fn a_plan_at_another_rate_has_the_same_noise() {
    for mechanism in ["planned", "independent", "none"] {
        let mut settings = settings(160, mechanism, 2.0);
        Turns { epochs: 4, turns: 1, clients: 160, free: true }.apply(&mut settings);
        let plan = RunPlanner::default().plan(&settings, &mut silent).unwrap();
        let faster =
            Settings { server_learning_rate: 3.0 * settings.server_learning_rate, ..settings.clone() };
        let other = plan.at_rate(&faster).unwrap();
        let rate = |plan: &Plan| plan.workload().optimizer().unwrap().1[0];
        assert_eq!(rate(&other), 3.0 * rate(&plan));
        let noise = |plan: &Plan| plan.mechanism().map(|m| m.privacy().unwrap().calibration().clone());
        assert_eq!((noise(&other), other.recipe()), (noise(&plan), plan.recipe()));
        // Two plans, so their streams differ.
        assert_ne!(other.hash(), plan.hash());
        assert!(plan.at_rate(&Settings { rounds: 5, ..faster }).is_err() || mechanism == "none");
    }
}
