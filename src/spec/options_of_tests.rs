//! Settings for tests of the core, which have no Python classes to take defaults from.

use super::{OptionValue, Options};

/// A key and its value a line, as Python writes it. A test holds them to the schemas of the classes.
const SETTINGS: &str = include_str!("options_of_tests.txt");

impl Options {
    /// The defaults of all classes; of a key with several the first one.
    pub(crate) fn of_tests() -> Self {
        let mut options = Self::default();
        for (key, value) in SETTINGS.lines().filter_map(|line| line.split_once(' ')) {
            options.insert(key, parsed(value));
        }
        options
    }
}

fn parsed(value: &str) -> OptionValue {
    match value {
        "None" => OptionValue::None,
        "True" | "False" => OptionValue::Bool(value == "True"),
        word if word.starts_with('\'') => OptionValue::Str(word.trim_matches('\'').to_owned()),
        number => number
            .parse()
            .map(OptionValue::Int)
            .or_else(|_| number.parse().map(OptionValue::Float))
            .unwrap_or_else(|_| panic!("{number} is no value")),
    }
}

#[test]
fn setting_that_is_not_there_is_an_error_that_names_it() {
    let error = Options::default().flag("strict").unwrap_err().to_string();
    assert!(error.contains("has no 'strict'"), "{error}");
    assert!(Options::of_tests().flag("strict").unwrap());
}
