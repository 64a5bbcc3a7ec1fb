use super::*;
use crate::data::{Feature, Label, Schema};
use crate::model::{Logistic, Mlp, Regressor};

fn schema(label: Label) -> Schema {
    let features = vec![
        Feature::Number { column: "a".into(), center: 1.0, scale: 2.0 },
        Feature::Category { column: "b".into(), values: vec!["x".into(), "ü".into()] },
    ];
    Schema { features, label, decimal: Default::default(), found: false }.checked().unwrap()
}

fn classes() -> Label {
    Label::Class { column: "y".into(), values: vec!["no".into(), "yes".into()], other: None }
}

fn saved(model: impl Into<Network>, input: Input) -> SavedModel {
    let model = model.into();
    let parameters = (0..model.parameters()).map(|i| ((i * 37 % 101) as f32 - 50.0) / 60.0).collect();
    SavedModel {
        card: Card { model, input, data: "own".into(), notes: vec!["a note".into()] },
        parameters,
        privacy: Some(serde_json::json!({ "epsilon": 2.0 })),
        statement: "ε = 2\n".into(),
        plan: "ab".into(),
    }
}

fn models() -> [SavedModel; 4] {
    let number = Label::Number { column: "y".into(), center: 10.0, scale: 4.0 };
    let features = |label| Input::Features { meaning: Meaning::Columns(schema(label)) };
    let pixels = Input::Features { meaning: Meaning::Pixels { rows: 2, columns: 2, classes: 3 } };
    let text = Input::Text {
        tokens: Tokens::Characters,
        symbols: "abé".chars().map(String::from).collect(),
        length: 20,
    };
    [
        saved(Logistic { features: 3, classes: 2 }, features(classes())),
        saved(Regressor { features: 3, hidden: vec![4] }, features(number)),
        saved(Mlp { features: 4, hidden: vec![5], classes: 3 }, pixels),
        saved(Lstm { vocabulary: 6, embedding: 2, hidden: 3, projection: Some(2) }, text),
    ]
}

#[test]
fn files_give_back_what_was_saved_and_other_readers_open_them() {
    let folder = tempfile::tempdir().unwrap();
    for (index, model) in models().into_iter().enumerate() {
        let path = folder.path().join(format!("{index}.safetensors"));
        model.save(path.as_path()).unwrap();
        assert_eq!(SavedModel::load(path.as_path()).unwrap(), model);
        let bytes = std::fs::read(&path).unwrap();
        model.save(path.as_path()).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), bytes, "the same bytes each time");
        // As a reader that knows nothing of dpmf sees it.
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let mut numbers = 0;
        for block in model.card.model.layout() {
            assert_eq!(block.shape.iter().product::<usize>(), block.range.len(), "{}", block.name);
            let view = tensors.tensor(&block.name).unwrap();
            assert_eq!(view.shape(), block.shape);
            numbers += view.data().len() / 4;
        }
        assert_eq!((numbers, tensors.len()), (model.parameters.len(), model.card.model.layout().len()));
    }
}

#[test]
fn other_files_and_damaged_ones_are_refused_with_a_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    let refused = |bytes: &[u8]| SavedModel::parse(bytes, &path).unwrap_err().to_string();
    assert!(refused(b"user,text\n").contains("not a safetensors file"));
    let other = |entry: Option<&str>| {
        let view = TensorView::new(Dtype::F32, vec![1], &[0; 4]).unwrap();
        let metadata = entry.map(|entry| HashMap::from([(KEY.to_owned(), entry.to_owned())]));
        safetensors::serialize([("a", view)], metadata).unwrap()
    };
    assert!(refused(&other(None)).contains("no dpmf metadata"));
    assert!(refused(&other(Some("{\"sha256\":\"\"}"))).contains("a mechanism or a plan"));
    assert!(refused(&other(Some("{\"format\":\"dpmf-model-9\"}"))).contains("dpmf-model-9"));
    assert!(refused(&other(Some("{\"format\":\"dpmf-model-1\"}"))).contains("damaged"));

    for model in models() {
        model.save(path.as_path()).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        // Any byte of the numbers, and of the header: an error or the same model, never a panic.
        for at in (0..bytes.len()).step_by(3) {
            let mut mutated = bytes.clone();
            mutated[at] ^= 0x15;
            if let Ok(read) = SavedModel::parse(&mutated, &path) {
                assert_eq!(read.parameters, model.parameters, "byte {at}");
            }
        }
        let mut last = bytes.clone();
        *last.last_mut().unwrap() ^= 1;
        assert!(refused(&last).contains("changed after it was written"));
        assert!(SavedModel::parse(&bytes[..bytes.len() - 1], &path).is_err());
    }

    // Sizes that no file could hold are refused before anything is allocated.
    let [model, ..] = models();
    let mut large = model.clone();
    large.card.model = Network::Logistic(Logistic { features: 1 << 24, classes: 1 << 16 });
    let header = serde_json::to_string(&Header {
        format: FORMAT.into(),
        card: large.card,
        privacy: None,
        statement: String::new(),
        plan: String::new(),
        sha256: String::new(),
        version: String::new(),
    });
    assert!(refused(&other(Some(&header.unwrap()))).contains("above what a model may have"));
}

#[test]
fn predictions_are_those_of_the_formula() {
    let [logistic, regressor, pixels, text] = models();
    let (features, w) = ([0.5_f32, 1.0, 0.0], &logistic.parameters);
    let logit = |class: usize| -> f64 {
        (0..3).map(|i| f64::from(w[3 * class + i]) * f64::from(features[i])).sum::<f64>()
            + f64::from(w[6 + class])
    };
    let expected = 1.0 / (1.0 + (logit(0) - logit(1)).exp());
    let Predictions::Classes(rows) = logistic.predict(&features).unwrap() else { panic!("classes") };
    assert!((rows[0][1] - expected).abs() < 1e-6 && (rows[0][0] + rows[0][1] - 1.0).abs() < 1e-12);
    let Predictions::Numbers(numbers) = regressor.predict(&[features, [0.0; 3]].concat()).unwrap() else {
        panic!("numbers")
    };
    let w: Vec<f64> = regressor.parameters.iter().map(|x| f64::from(*x)).collect();
    let hidden = |unit: usize, x: &[f32; 3]| {
        ((0..3).map(|i| w[3 * unit + i] * f64::from(x[i])).sum::<f64>() + w[12 + unit]).tanh()
    };
    for (number, x) in numbers.iter().zip([features, [0.0; 3]]) {
        let value = (0..4).map(|unit| w[16 + unit] * hidden(unit, &x)).sum::<f64>() + w[20];
        assert!((number - (10.0 + 4.0 * value)).abs() < 1e-4, "{number} {value}");
    }
    assert!(matches!(pixels.predict(&[0.1; 8]).unwrap(), Predictions::Classes(rows) if rows.len() == 2));
    assert!(pixels.predict(&[0.1; 7]).is_err());
    assert!(text.predict(&[]).unwrap_err().to_string().contains("write texts with it instead"));
    assert!(
        logistic
            .write(&SampleOptions::default())
            .unwrap_err()
            .to_string()
            .contains("predict rows with it instead")
    );
}

#[test]
fn texts_begin_and_end_as_asked_and_follow_from_the_seed() {
    let [.., text] = models();
    let options = SampleOptions { count: 30, length: 5, start: "ba".into(), ..SampleOptions::default() };
    let texts = text.write(&options).unwrap();
    assert_eq!(texts.len(), 30);
    assert!(texts.iter().all(|t| t.starts_with("ba") && (2..=7).contains(&t.chars().count())));
    assert_eq!(texts, text.write(&options).unwrap());
    assert_ne!(texts, text.write(&SampleOptions { seed: 1, ..options.clone() }).unwrap());
    let cold = text.write(&SampleOptions { temperature: 1e-3, ..options.clone() }).unwrap();
    assert!(cold.iter().all(|t| *t == cold[0]), "the likeliest alone: {cold:?}");
    for (bad, message) in [
        (SampleOptions { start: "z".into(), ..options.clone() }, "does not know"),
        (SampleOptions { temperature: f64::NAN, ..options.clone() }, "positive and finite"),
        (SampleOptions { length: 0, ..options.clone() }, "between 1 and 10000"),
    ] {
        assert!(text.write(&bad).unwrap_err().to_string().contains(message));
    }
}
