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
    /// A list of real numbers that are not all integers.
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

/// The settings of one group by key. Defaults belong to the Python classes: to read a key that is not there is an error.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options {
    values: BTreeMap<String, OptionValue>,
    /// True if the parameters are on a device with matrix units, which multiply narrow types the fastest. No key of a group.
    pub matrix_units: bool,
    /// True if the parameters are on no CPU. No key of a group.
    pub on_device: bool,
}

impl Options {
    /// Records one setting.
    pub fn insert(&mut self, key: &str, value: OptionValue) {
        self.values.insert(key.to_owned(), value);
    }

    /// Tests whether a setting is a function of the user.
    #[must_use]
    pub fn has_functions(&self) -> bool {
        self.values.values().any(|value| matches!(value, OptionValue::Callback(_)))
    }

    fn get(&self, key: &str) -> Result<&OptionValue> {
        self.values.get(key).ok_or_else(|| {
            Error::Value(format!("the group has no '{key}', and no class of Python has a default for it"))
        })
    }

    fn wrong<T>(key: &str, wanted: &str, got: &OptionValue) -> Result<T> {
        Err(Error::Value(format!("{key} must be {wanted}, got {got:?}")))
    }

    /// Tests whether the group's algorithm has the setting at all.
    #[must_use]
    pub fn has(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    /// Tests whether the value of the key is other than None.
    ///
    /// # Errors
    /// `Error::Value` when the key is not there.
    pub fn is_set(&self, key: &str) -> Result<bool> {
        Ok(*self.get(key)? != OptionValue::None)
    }

    /// A flag.
    ///
    /// # Errors
    /// `Error::Value` when the key is not there or its value is no flag.
    pub fn flag(&self, key: &str) -> Result<bool> {
        match self.get(key)? {
            OptionValue::Bool(b) => Ok(*b),
            OptionValue::Int(i @ (0 | 1)) => Ok(*i == 1),
            other => Self::wrong(key, "True or False", other),
        }
    }

    /// True if the decay acts only where it points along the update.
    ///
    /// # Errors
    /// As `flag`.
    pub fn cautious(&self) -> Result<bool> {
        self.flag("cautious_wd")
    }

    /// True if steps are counted where the parameters are, for graphs that count.
    ///
    /// # Errors
    /// As `flag`.
    pub fn capturable(&self) -> Result<bool> {
        self.flag("capturable")
    }

    /// A word.
    ///
    /// # Errors
    /// `Error::Value` when the key is not there or its value is no word.
    pub fn word(&self, key: &str) -> Result<&str> {
        match self.get(key)? {
            OptionValue::Str(s) => Ok(s),
            other => Self::wrong(key, "a string", other),
        }
    }

    /// A word, or None.
    ///
    /// # Errors
    /// As `word`.
    pub fn optional_word(&self, key: &str) -> Result<Option<&str>> {
        Ok(if self.is_set(key)? { Some(self.word(key)?) } else { None })
    }

    /// One word or several.
    ///
    /// # Errors
    /// `Error::Value` when the key is not there or its value is neither.
    pub fn words(&self, key: &str) -> Result<Vec<String>> {
        match self.get(key)? {
            OptionValue::Str(word) => Ok(vec![word.clone()]),
            OptionValue::Strs(words) => Ok(words.clone()),
            // An empty list has no kind.
            OptionValue::Ints(numbers) if numbers.is_empty() => Ok(Vec::new()),
            other => Self::wrong(key, "a string or a list of strings", other),
        }
    }

    /// Choice between two words: false for the first, true for the second.
    ///
    /// # Errors
    /// `Error::Value` when the key is not there or its value is neither.
    pub fn either(&self, key: &str, first: &str, second: &str) -> Result<bool> {
        match self.word(key)? {
            word if word == first || word == second => Ok(word == second),
            other => Err(Error::Value(format!("{key} must be '{first}' or '{second}', got '{other}'"))),
        }
    }

    /// A word, `None` when the value is None or a list.
    ///
    /// # Errors
    /// `Error::Value` when the key is not there or its value is a flag or number.
    pub fn name(&self, key: &str) -> Result<Option<&str>> {
        match self.get(key)? {
            OptionValue::None | OptionValue::Ints(_) | OptionValue::Floats(_) | OptionValue::Rows(_) => {
                Ok(None)
            }
            OptionValue::Str(s) => Ok(Some(s)),
            other => Self::wrong(key, "a name or a list", other),
        }
    }

    /// One triple of real numbers, `None` for any other value.
    ///
    /// # Errors
    /// `Error::Value` when the key is not there.
    #[expect(clippy::cast_precision_loss, reason = "coefficients are small")]
    pub fn triple(&self, key: &str) -> Result<Option<[f64; 3]>> {
        Ok(match self.get(key)? {
            OptionValue::Floats(v) => <[f64; 3]>::try_from(v.as_slice()).ok(),
            OptionValue::Ints(v) => <[i64; 3]>::try_from(v.as_slice()).ok().map(|v| v.map(|i| i as f64)),
            _ => None,
        })
    }

    /// A list of triples of real numbers, or None.
    ///
    /// # Errors
    /// `Error::Value` when the key is not there or for anything else.
    pub fn triples(&self, key: &str) -> Result<Option<Vec<[f64; 3]>>> {
        let value = self.get(key)?;
        match value {
            OptionValue::None => Ok(None),
            OptionValue::Ints(v) if v.is_empty() => Ok(Some(Vec::new())),
            OptionValue::Rows(rows) => rows
                .iter()
                .map(|row| {
                    <[f64; 3]>::try_from(row.as_slice())
                        .or_else(|_| Self::wrong(key, "a list of triples (a, b, c)", value))
                })
                .collect::<Result<Vec<_>>>()
                .map(Some),
            _ => Self::wrong(key, "a list of triples (a, b, c)", value),
        }
    }

    /// A function of the user, or None.
    ///
    /// # Errors
    /// `Error::Value` when the key is not there, `Error::Type` for anything else.
    pub fn callback(&self, key: &str) -> Result<Option<&Callback>> {
        match self.get(key)? {
            OptionValue::None => Ok(None),
            OptionValue::Callback(function) => Ok(Some(function)),
            other => Err(Error::Type(format!("{key} must be callable, got {other:?}"))),
        }
    }

    /// A non-negative integer.
    ///
    /// # Errors
    /// `Error::Value` when the key is not there or its value is negative or no integer.
    pub fn count(&self, key: &str) -> Result<usize> {
        let value = self.get(key)?;
        match value {
            OptionValue::Int(i) => {
                usize::try_from(*i).or_else(|_| Self::wrong(key, "an integer >= 0", value))
            }
            _ => Self::wrong(key, "an integer >= 0", value),
        }
    }

    /// A non-negative integer, or None.
    ///
    /// # Errors
    /// As `count`.
    pub fn optional_count(&self, key: &str) -> Result<Option<usize>> {
        Ok(if self.is_set(key)? { Some(self.count(key)?) } else { None })
    }

    /// A list of non-negative integers; that of None is empty.
    ///
    /// # Errors
    /// `Error::Value` when the key is not there or for anything else.
    pub fn counts(&self, key: &str) -> Result<Vec<usize>> {
        let value = self.get(key)?;
        match value {
            OptionValue::None => Ok(Vec::new()),
            OptionValue::Ints(v) => v
                .iter()
                .map(|i| usize::try_from(*i).or_else(|_| Self::wrong(key, "positive integers", value)))
                .collect(),
            _ => Self::wrong(key, "a tuple of positive integers", value),
        }
    }

    /// A real number.
    ///
    /// # Errors
    /// `Error::Value` when the key is missing or its value is not a number.
    pub fn real(&self, key: &str) -> Result<f64> {
        match self.get(key)? {
            OptionValue::Float(x) => Ok(*x),
            #[allow(clippy::cast_precision_loss)] // settings are small integers
            OptionValue::Int(i) => Ok(*i as f64),
            other => Self::wrong(key, "a number", other),
        }
    }

    /// A number in (0, 1].
    ///
    /// # Errors
    /// `Error::Value` when the key is not there or for anything else.
    pub fn share(&self, key: &str) -> Result<f64> {
        let share = self.real(key)?;
        if share > 0.0 && share <= 1.0 {
            Ok(share)
        } else {
            Err(Error::Value(format!("{key} must be a number > 0 and <= 1, got {share}")))
        }
    }

    /// An element type by torch's name, `None` when it is None or "auto".
    ///
    /// # Errors
    /// `Error::Value` when the key is not there or for another name.
    pub fn dtype(&self, key: &str) -> Result<Option<DType>> {
        self.optional_word(key)?.filter(|name| *name != "auto").map(DType::parse).transpose()
    }
}
