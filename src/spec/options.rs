//! The structural settings of a group: those that shape the plan. Live scalars are in `hyper.rs`.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::tensor::DType;

/// One setting as it came from the group.
#[derive(Clone, Debug, PartialEq)]
pub enum OptionValue {
    /// No value: the setting is not set.
    None,
    /// A flag.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// A real number.
    Float(f64),
    /// A word.
    Str(String),
    /// A list of words.
    Strs(Vec<String>),
    /// A list of integers.
    Ints(Vec<i64>),
    /// A list of real numbers, of which one is no integer.
    Floats(Vec<f64>),
    /// A list of lists of real numbers.
    Rows(Vec<Vec<f64>>),
    /// A function of the user.
    Callback(Callback),
}

/// Function of the user, type-erased: only its maker and its user know the type.
#[derive(Clone)]
pub struct Callback {
    name: String,
    identity: usize,
    function: Arc<dyn Any + Send + Sync>,
}

impl Callback {
    /// Wraps `function`. `name` is what a plan shows; callbacks of one `identity` are the same function.
    pub fn new<F: Any + Send + Sync>(name: String, identity: usize, function: F) -> Self {
        Self { name, identity, function: Arc::new(function) }
    }

    /// The function, if it has this type.
    #[must_use]
    pub fn get<F: Any>(&self) -> Option<&F> {
        self.function.downcast_ref()
    }
}

impl std::fmt::Debug for Callback {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)
    }
}

impl PartialEq for Callback {
    fn eq(&self, other: &Self) -> bool {
        self.identity == other.identity && self.name == other.name
    }
}

/// Internal key, not one of a group: true if bfloat16 matrices are the fastest to multiply on the parameters' device.
pub const BFLOAT16_PRODUCTS: &str = "bfloat16_products";

/// The settings of one group by key; a key that the group lacks reads as not set.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options(BTreeMap<String, OptionValue>);

impl Options {
    /// Records one setting.
    pub fn insert(&mut self, key: &str, value: OptionValue) {
        self.0.insert(key.to_owned(), value);
    }

    /// Tests whether a setting is a function of the user.
    #[must_use]
    pub fn has_functions(&self) -> bool {
        self.0.values().any(|value| matches!(value, OptionValue::Callback(_)))
    }

    fn get(&self, key: &str) -> &OptionValue {
        self.0.get(key).unwrap_or(&OptionValue::None)
    }

    fn wrong<T>(&self, key: &str, wanted: &str) -> Result<T> {
        Err(Error::Value(format!("{key} must be {wanted}, got {:?}", self.get(key))))
    }

    /// Tests whether the group sets the key to anything.
    #[must_use]
    pub fn is_set(&self, key: &str) -> bool {
        *self.get(key) != OptionValue::None
    }

    /// A flag; not set is false.
    ///
    /// # Errors
    /// `Error::Value` when it is no flag.
    pub fn flag(&self, key: &str) -> Result<bool> {
        self.flag_or(key, false)
    }

    /// A flag with a value for "not set".
    ///
    /// # Errors
    /// `Error::Value` when it is no flag.
    pub fn flag_or(&self, key: &str, unset: bool) -> Result<bool> {
        match self.get(key) {
            OptionValue::None => Ok(unset),
            OptionValue::Bool(b) => Ok(*b),
            OptionValue::Int(i @ (0 | 1)) => Ok(*i == 1),
            _ => self.wrong(key, "True or False"),
        }
    }

    /// A word, `None` when it is not set.
    ///
    /// # Errors
    /// `Error::Value` when it is no word.
    pub fn word(&self, key: &str) -> Result<Option<&str>> {
        match self.get(key) {
            OptionValue::None => Ok(None),
            OptionValue::Str(s) => Ok(Some(s)),
            _ => self.wrong(key, "a string"),
        }
    }

    /// One word or several, `None` when it is not set.
    ///
    /// # Errors
    /// `Error::Value` when it is neither.
    pub fn words(&self, key: &str) -> Result<Option<Vec<String>>> {
        match self.get(key) {
            OptionValue::None => Ok(None),
            OptionValue::Str(word) => Ok(Some(vec![word.clone()])),
            OptionValue::Strs(words) => Ok(Some(words.clone())),
            // An empty list has no kind.
            OptionValue::Ints(numbers) if numbers.is_empty() => Ok(Some(Vec::new())),
            _ => self.wrong(key, "a string or a list of strings"),
        }
    }

    /// Choice between two words: false for the first or not set, true for the second.
    ///
    /// # Errors
    /// `Error::Value` for anything else.
    pub fn either(&self, key: &str, first: &str, second: &str) -> Result<bool> {
        match self.word(key)? {
            None => Ok(false),
            Some(word) if word == first || word == second => Ok(word == second),
            Some(other) => Err(Error::Value(format!("{key} must be '{first}' or '{second}', got '{other}'"))),
        }
    }

    /// A word, `None` when it is not set or another kind of value.
    ///
    /// # Errors
    /// `Error::Value` for a flag or number.
    pub fn name(&self, key: &str) -> Result<Option<&str>> {
        match self.get(key) {
            OptionValue::None | OptionValue::Ints(_) | OptionValue::Floats(_) | OptionValue::Rows(_) => {
                Ok(None)
            }
            OptionValue::Str(s) => Ok(Some(s)),
            _ => self.wrong(key, "a name or a list"),
        }
    }

    /// One triple of real numbers, `None` for any other value.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "coefficients are small")]
    pub fn triple(&self, key: &str) -> Option<[f64; 3]> {
        match self.get(key) {
            OptionValue::Floats(v) => <[f64; 3]>::try_from(v.as_slice()).ok(),
            OptionValue::Ints(v) => <[i64; 3]>::try_from(v.as_slice()).ok().map(|v| v.map(|i| i as f64)),
            _ => None,
        }
    }

    /// A list of triples of real numbers, `None` when it is not set.
    ///
    /// # Errors
    /// `Error::Value` for anything else.
    pub fn triples(&self, key: &str) -> Result<Option<Vec<[f64; 3]>>> {
        match self.get(key) {
            OptionValue::None => Ok(None),
            OptionValue::Ints(v) if v.is_empty() => Ok(Some(Vec::new())),
            OptionValue::Rows(rows) => rows
                .iter()
                .map(|row| {
                    <[f64; 3]>::try_from(row.as_slice())
                        .or_else(|_| self.wrong(key, "a list of triples (a, b, c)"))
                })
                .collect::<Result<Vec<_>>>()
                .map(Some),
            _ => self.wrong(key, "a list of triples (a, b, c)"),
        }
    }

    /// A function of the user, `None` when it is not set.
    ///
    /// # Errors
    /// `Error::Type` for anything else.
    pub fn callback(&self, key: &str) -> Result<Option<&Callback>> {
        match self.get(key) {
            OptionValue::None => Ok(None),
            OptionValue::Callback(function) => Ok(Some(function)),
            other => Err(Error::Type(format!("{key} must be callable, got {other:?}"))),
        }
    }

    /// A non-negative integer, `None` when it is not set.
    ///
    /// # Errors
    /// `Error::Value` when it is negative or no integer.
    pub fn optional_count(&self, key: &str) -> Result<Option<usize>> {
        match self.get(key) {
            OptionValue::None => Ok(None),
            OptionValue::Int(i) if *i >= 0 => {
                usize::try_from(*i).map(Some).or_else(|_| self.wrong(key, "an integer >= 0"))
            }
            _ => self.wrong(key, "an integer >= 0"),
        }
    }

    /// A non-negative integer with a value for "not set".
    ///
    /// # Errors
    /// As `optional_count`.
    pub fn count(&self, key: &str, unset: usize) -> Result<usize> {
        Ok(self.optional_count(key)?.unwrap_or(unset))
    }

    /// A list of non-negative integers; not set is empty.
    ///
    /// # Errors
    /// `Error::Value` for anything else.
    pub fn counts(&self, key: &str) -> Result<Vec<usize>> {
        match self.get(key) {
            OptionValue::None => Ok(Vec::new()),
            OptionValue::Ints(v) => v
                .iter()
                .map(|i| usize::try_from(*i).or_else(|_| self.wrong(key, "positive integers")))
                .collect(),
            _ => self.wrong(key, "a tuple of positive integers"),
        }
    }

    /// A real number with a value for "not set".
    ///
    /// # Errors
    /// `Error::Value` when it is no number.
    pub fn real(&self, key: &str, unset: f64) -> Result<f64> {
        match self.get(key) {
            OptionValue::None => Ok(unset),
            OptionValue::Float(x) => Ok(*x),
            #[allow(clippy::cast_precision_loss)] // settings are small integers
            OptionValue::Int(i) => Ok(*i as f64),
            _ => self.wrong(key, "a number"),
        }
    }

    /// A number in (0, 1].
    ///
    /// # Errors
    /// `Error::Value` for anything else.
    pub fn share(&self, key: &str, unset: f64) -> Result<f64> {
        let share = self.real(key, unset)?;
        if share > 0.0 && share <= 1.0 {
            Ok(share)
        } else {
            Err(Error::Value(format!("{key} must be a number > 0 and <= 1, got {share}")))
        }
    }

    /// An element type by torch's name, `None` when it is not set or "auto".
    ///
    /// # Errors
    /// `Error::Value` for another name.
    pub fn dtype(&self, key: &str) -> Result<Option<DType>> {
        self.word(key)?.filter(|name| *name != "auto").map(DType::parse).transpose()
    }
}
