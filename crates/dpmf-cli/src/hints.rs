//! What the libraries hint at, in flags and commands.

use dpmf_train::{Error, Hint, Remark};

/// An error, its hint in flags.
pub fn error(error: &(dyn std::error::Error + 'static)) -> String {
    match error.downcast_ref() {
        Some(Error::Hinted { error, hint }) => format!("{error}: {}", flags(*hint)),
        _ => error.to_string(),
    }
}

/// A remark, its hint in flags.
pub fn remark(remark: &Remark) -> String {
    match remark.hint {
        Some(hint) => format!("{}: {}", remark.text, flags(hint)),
        None => remark.text.clone(),
    }
}

fn flags(hint: Hint) -> String {
    let words = match hint {
        Hint::UserColumn => {
            "name it with --user, or pass --rows-are-users if every row belongs to a different person"
        }
        Hint::LabelColumn => "name it with --label",
        Hint::FeatureColumns => "name the columns with --features",
        Hint::TextColumn => "name it with --text",
        Hint::TextOrLabelColumn => {
            "name it with --text, or name the column that is to be predicted with --label"
        }
        Hint::LeaveOutOrDescribe => {
            "leave it out with --features, pass it as --text, or describe it with --schema"
        }
        Hint::Schema => "describe the columns with --schema",
        Hint::PublicWords => {
            "pass --public-share 0.1 to treat a tenth of the users as public, --vocabulary FILE for a public list of words, or \
             --vocabulary-from-training, which ε does not cover; --tokens characters needs no words"
        }
        Hint::PublicScales => {
            "pass --schema FILE to give them, --public-share 0.1 to treat a tenth of the users as public, or \
             --schema-from-training to take them from the training users, which ε does not cover"
        }
        Hint::FewUsers => {
            "describe the columns with --schema FILE, treat a tenth of the users as public with --public-share 0.1, or spend more of the \
             budget with --schema-share"
        }
        Hint::Decimal => "pass --decimal . or --decimal , to read them",
        Hint::Exclude => "leave it out with --exclude",
        Hint::Describe => {
            "describe the columns with --schema FILE, or spend more of the budget with --schema-share"
        }
        Hint::Classes => "name the classes with --classes",
        Hint::DropUnlabelled => "pass --drop-unlabelled to leave out rows without a label",
        Hint::ExamplesPerUser => "see --examples-per-user",
        Hint::ExampleLength => "see --example-length",
        Hint::EpochsOrMechanism => "pass --epochs, or name a mechanism with --mechanism",
        Hint::Sample => "see `dpmf sample`",
        Hint::Predict => "see `dpmf predict`",
        other => return other.to_string(),
    };
    words.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    /// A hint without words here would be shown in the words of the library.
    #[test]
    fn every_hint_names_a_flag_of_training_or_a_command() {
        let program = crate::Cli::command();
        let train = program.find_subcommand("train").unwrap();
        let is_flag = |name: &str| {
            train.get_arguments().any(|argument| {
                let aliases = argument.get_visible_aliases().unwrap_or_default();
                argument.get_long() == Some(name) || aliases.contains(&name)
            })
        };
        // What the rows lack, no flag gives.
        for hint in Hint::ALL.into_iter().filter(|hint| *hint != Hint::TrainedColumns) {
            let words = flags(hint);
            let named: Vec<&str> =
                words.split([' ', ',']).filter_map(|word| word.strip_prefix("--")).collect();
            let command = words.strip_prefix("see `dpmf ").and_then(|rest| rest.strip_suffix('`'));
            assert!(named.iter().all(|name| is_flag(name)), "{hint:?}: {words}");
            match command {
                Some(command) => assert!(program.find_subcommand(command).is_some(), "{hint:?}: {words}"),
                None => assert!(!named.is_empty(), "{hint:?}: {words}"),
            }
        }
    }

    #[test]
    fn a_hint_is_told_in_flags_at_any_depth_of_a_story() {
        let fault = || Error::Hinted {
            error: Box::new(Error::Data { path: "t.csv".into(), message: "no users".into() }),
            hint: Hint::Schema,
        };
        let story = crate::failure::error_chain(&anyhow::Error::from(fault()).context("cannot train"));
        assert_eq!(story, "cannot train: t.csv: no users: describe the columns with --schema");
        assert_eq!(fault().to_string(), "t.csv: no users: give a schema that describes the columns");
        let cut = Remark { text: "3 texts are cut".into(), hint: Some(Hint::ExampleLength) };
        assert_eq!(remark(&cut), "3 texts are cut: see --example-length");
    }
}
