use super::*;

fn search(names: &[&str], predict: Option<Predict>, mu: f64) -> Search {
    let column = |name: &&str| Column { name: (*name).into(), text: false, declared: None };
    Search {
        features: names.iter().map(column).collect(),
        label: "y".into(),
        predict,
        classes: None,
        decimal: Decimal::Plain,
        date_parts: Vec::new(),
        unit: PrivacyUnit::User,
        beside: ExtraRelease { mu, delta: 1e-7 },
        table: "t.csv".into(),
    }
}

/// Ages about 50, years about 2000, towns of which one is rare, dates of 2024, and a label.
fn rows(users: usize, label: fn(usize) -> Field) -> Vec<Vec<Field>> {
    let part = |user: usize, of: usize| (user * 7919 + 31 * of) % 1000;
    (0..users)
        .map(|user| {
            let town = match part(user, 2) {
                0..5 => "Worms",
                5..400 => "Bonn",
                _ => "Ulm",
            };
            vec![
                if part(user, 0) < 100 {
                    Field::Missing
                } else {
                    Field::Number(20.0 + part(user, 1) as f64 * 0.06)
                },
                Field::Number(1990.0 + (part(user, 3) % 21) as f64),
                Field::Word(town.into()),
                Field::Date(19_723.0 + part(user, 4) as f64 * 0.366),
                label(user),
            ]
        })
        .collect()
}

const NAMES: [&str; 4] = ["age", "year", "town", "day"];

#[test]
fn a_schema_is_found_and_found_again() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("schema");
    let search = search(&NAMES, None, 0.3);
    let rows = rows(6000, |user| Field::Word(if user % 3 == 0 { "approved" } else { "denied" }.into()));
    let found = search.find(&place, &KeySource::System, &rows).unwrap();
    let Schema { features, label, .. } = &found.schema;
    let [
        Feature::Number { center: age, scale: ages, .. },
        Feature::Number { center: year, scale: years, .. },
        Feature::Category { values, .. },
        Feature::Date { center: day, scale: days, .. },
    ] = &features[..]
    else {
        panic!("{features:?}")
    };
    // The true ones are 50 and 17.3, 2000 and 6.1, 19,905 and 105.7.
    assert!((age - 50.0).abs() < 6.0 && (12.0..25.0).contains(ages), "{age} {ages}");
    assert!((year - 2000.0).abs() < 20.0 && (3.0..40.0).contains(years), "{year} {years}");
    assert!((day - 19_905.0).abs() < 60.0 && (60.0..200.0).contains(days), "{day} {days}");
    assert_eq!(values, &["Bonn", "Ulm"]);
    assert_eq!(
        label,
        &Label::Class { column: "y".into(), values: vec!["approved".into(), "denied".into()], other: None }
    );
    assert!(
        found.remarks.iter().any(|remark| remark.text.contains("`age` has nothing in about")),
        "{:?}",
        found.remarks
    );

    // What was kept is taken; without it, the same noise gives the same schema; other rows are refused.
    assert_eq!(search.find(&place, &KeySource::System, &[]).unwrap(), found);
    std::fs::remove_file(place.join("schema.json")).unwrap();
    assert_eq!(search.find(&place, &KeySource::System, &rows).unwrap(), found);
    std::fs::remove_file(place.join("schema.json")).unwrap();
    let mut other = rows.clone();
    other[17][0] = Field::Number(33.0);
    let message = search.find(&place, &KeySource::System, &other).unwrap_err().to_string();
    assert!(message.contains("begin a new run"), "{message}");
    // Only marks under the key are on disk.
    let manifest = std::fs::read_to_string(place.join("release.json")).unwrap();
    assert!(!manifest.contains("approved") && !place.join("schema.json").exists());

    // A seeded key gives the same schema in another place, and another one for other rows.
    let [a, b] =
        ["a", "b"].map(|name| search.find(&folder.path().join(name), &KeySource::Seed(1), &rows).unwrap());
    assert_eq!(a, b);
    assert_ne!(search.find(&folder.path().join("c"), &KeySource::Seed(1), &other).unwrap().schema, a.schema);
}

#[test]
fn labels_are_recognised() {
    let found = |label: fn(usize) -> Field, predict| {
        let folder = tempfile::tempdir().unwrap();
        let search = search(&NAMES, predict, 0.3);
        let found = search.find(folder.path(), &KeySource::Seed(3), &rows(5000, label));
        found.map(|found| found.schema.label).map_err(|error| error.to_string())
    };
    let classes = |label: Label| match label {
        Label::Class { values, other, .. } => (values, other),
        Label::Number { .. } => panic!("a number"),
    };
    let two = found(|user| Field::Number((user % 2) as f64), None).unwrap();
    assert_eq!(classes(two), (vec!["0".into(), "1".into()], None));
    let price = found(|user| Field::Number(100.0 + (user % 977) as f64 * 0.37), None).unwrap();
    let Label::Number { center, scale, .. } = price else { panic!("{price:?}") };
    assert!((center - 280.0).abs() < 50.0 && (60.0..180.0).contains(&scale), "{center} {scale}");
    let count = found(|user| Field::Number((user * 31 % 61) as f64), Some(Predict::Regression)).unwrap();
    assert!(matches!(count, Label::Number { .. }));
    // A rare class is one of the others.
    let rare = |user: usize| {
        let names = ["red", "green", "blue"];
        Field::Word(if user.is_multiple_of(10) {
            format!("rare {}", user % 997).into()
        } else {
            names[user % 3].into()
        })
    };
    let (values, other) = classes(found(rare, None).unwrap());
    assert_eq!(
        (values, other),
        (["blue", "green", "red", "other"].map(String::from).into(), Some("other".into()))
    );
    let message = found(|_| Field::Word("same".into()), None).unwrap_err();
    assert!(message.contains("is \"same\" in all rows") && message.starts_with("t.csv"), "{message}");
}

#[test]
fn few_users_are_refused_before_anything_is_spent() {
    let search = search(&NAMES, None, 0.15);
    let message = search.check(26).unwrap_err().to_string();
    assert!(message.contains("26 users to train on are too few"), "{message}");
    search.check(5000).unwrap();
}

/// The noise of all looks together is that of the μ that is stated.
#[test]
fn the_looks_together_cost_what_is_stated() {
    let search = search(&NAMES, Some(Predict::Regression), 0.3);
    for users in [300, 30_000] {
        let rows = rows(users, |user| Field::Number((user % 977) as f64));
        let spent = std::cell::RefCell::new(Vec::new());
        let release = |_: &str, mu: f64, sum: Vec<i64>| {
            let noise = noise::mechanism(mu, PrivacyUnit::User)?;
            spent.borrow_mut().push(noise.privacy().unwrap().calibration().curve().clone());
            // No noise here: only what it would cost is looked at.
            Ok(sum.iter().map(|units| (*units as f64 / Weights::UNITS) as f32).collect())
        };
        search.look(&rows, &release).unwrap();
        let total = dpmf::accounting::PrivacyCurve::compose(&spent.borrow()).unwrap();
        let mu = total.mu().unwrap();
        assert!(mu <= 0.3 && (users < 1000 || mu > 0.2999), "{users}: {mu}");
    }
}

#[test]
fn one_user_in_place_of_another_counts_twice_where_not_all_are_counted() {
    let search = search(&NAMES, None, 0.3);
    let [all, most] = [MOST_USERS - 1, MOST_USERS].map(|users| search.spending(users).unwrap());
    assert!(most.first == 0.5 * all.first && most.second == all.second.map(|mu| 0.5 * mu));
}

#[test]
fn a_schema_is_found_in_memory_as_in_a_directory() {
    let folder = tempfile::tempdir().unwrap();
    let search = search(&NAMES, None, 0.3);
    let rows = rows(6000, |user| Field::Number((user % 2) as f64));
    let kept = search.find(folder.path(), &KeySource::Seed(1), &rows).unwrap();
    assert_eq!(search.find_once(&KeySource::Seed(1), &rows).unwrap(), kept);
    assert!(kept.schema.found);
    // A key of the system's own gives other noise every time.
    let once = || search.find_once(&KeySource::System, &rows).unwrap().schema;
    assert_ne!(once(), once());
}

/// 300 users at μ = 0.12: noise of more than a tenth of them in every cell. What most columns are is found all the same.
#[test]
fn few_users_are_read_by_what_is_probable() {
    let rows: Vec<Vec<Field>> = rows(300, |user| Field::Number(f64::from(user as u32 % 97) * 1.7));
    let (mut ages, mut labels) = (0, 0);
    const SEEDS: u64 = 24;
    for seed in 0..SEEDS {
        let search = search(&NAMES, Some(Predict::Regression), 0.12);
        let found = search.find_once(&KeySource::Seed(seed), &rows).unwrap().schema;
        let age = found.features.iter().find(|feature| feature.column() == "age");
        if let Some(Feature::Number { center, scale, .. }) = age {
            ages += u32::from((20.0..90.0).contains(center) && (6.0..60.0).contains(scale));
        }
        // Where a column is taken for another kind, what it holds counts as the middle.
        assert!(found.found && found.row(|_| Some("x".into())).is_ok());
        let (center, scale) = found.scale().unwrap();
        labels += u32::from((25.0..200.0).contains(&center) && (15.0..200.0).contains(&scale));
    }
    assert!(ages >= 14 && labels >= 18, "{ages} {labels} of {SEEDS}");
}

#[test]
fn classes_that_are_small_numbers_or_usual_words_are_found_among_few_users() {
    const SEEDS: u64 = 20;
    let found = |label: fn(usize) -> Field, expected: &[&str]| {
        let rows = rows(250, label);
        let search = search(&NAMES, Some(Predict::Classification), 0.1);
        let right = |seed: &u64| {
            let found = search.find_once(&KeySource::Seed(*seed), &rows);
            found.is_ok_and(|found| {
                let classes = found.schema.classes().unwrap().to_vec();
                expected.iter().all(|class| classes.iter().any(|other| other == class))
            })
        };
        (0..SEEDS).filter(right).count()
    };
    let numbers = found(|user| Field::Number((user % 3) as f64), &["0", "1", "2"]);
    let words = found(|user| Field::Word(["Yes", "No"][user % 2].into()), &["Yes", "No"]);
    assert!(numbers >= 14 && words >= 16, "{numbers} {words} of {SEEDS}");
    // Power: words that nobody listed are not told of so few.
    assert!(found(|user| Field::Word(["Asa", "Bea", "Eva"][user % 3].into()), &["Asa", "Bea", "Eva"]) <= 4);
}

/// Sales of 0 to 16 with one decimal: small whole numbers have cells of their own, and yet it is a number.
#[test]
fn small_numbers_are_told_from_classes_among_few_users() {
    const SEEDS: u64 = 20;
    let numbers = |label: fn(usize) -> Field| {
        let rows = rows(250, label);
        let is_number = |seed: &u64| {
            let found = search(&NAMES, None, 0.12).find_once(&KeySource::Seed(*seed), &rows);
            found.is_ok_and(|found| found.schema.scale().is_some())
        };
        (0..SEEDS).filter(is_number).count()
    };
    let sales = numbers(|user| Field::Number((user * 37 % 161) as f64 / 10.0));
    let half_whole = numbers(|user| Field::Number((user * 37 % 41) as f64 / 2.0));
    assert!(sales >= 18 && half_whole >= 16, "{sales} {half_whole} of {SEEDS}");
    // Power: small whole numbers alone are classes, and so are usual words.
    assert!(numbers(|user| Field::Number((user % 3) as f64)) <= 4);
    assert!(numbers(|user| Field::Word(["Yes", "No"][user % 2].into())) <= 2);
}

/// Numbers that are zero in nine of ten rows: a scale by the middle half of them would be next to nothing.
#[test]
fn the_scale_of_a_column_that_is_mostly_zero_is_that_of_the_others() {
    let rows: Vec<Vec<Field>> = (0..6000)
        .map(|user| {
            let count = |of: usize| {
                let chance = (user * 7919 + 31 * of) % 1000;
                Field::Number(if chance < 900 { 0.0 } else { (chance % 16 + 1) as f64 })
            };
            vec![count(0), count(500), Field::Number((user % 97) as f64)]
        })
        .collect();
    for (mu, seed) in [(0.3, 1), (0.3, 2), (1.2, 3), (1.2, 4)] {
        let search = search(&["a", "b"], Some(Predict::Regression), mu);
        let found = search.find_once(&KeySource::Seed(seed), &rows).unwrap().schema;
        for feature in &found.features {
            let Feature::Number { scale, .. } = feature else { panic!("{feature:?}") };
            // The true one is 2.9.
            assert!((0.5..30.0).contains(scale), "{mu}: {feature:?}");
        }
    }
}

#[test]
fn the_share_for_a_schema_follows_from_public_numbers() {
    let share = |columns: usize, users: usize, mu: f64| {
        let names: Vec<String> = (0..columns).map(|column| format!("c{column}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        search(&names, None, mu).usual_share(users, mu).unwrap()
    };
    assert_eq!((share(10, 100, 0.2), share(10, 100_000, 0.2)), (0.4, 0.05));
    let (few, many) = (share(5, 800, 0.35), share(10, 800, 0.35));
    assert!(0.05 < few && few < many && many < 0.4, "{few} {many}");
}
