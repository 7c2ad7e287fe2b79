//! The one error type of the core. The border maps its variants to Python classes.

/// Result of every fallible function of the core.
pub type Result<T> = std::result::Result<T, Error>;

/// Errors of the core, by the class of exception that a user sees.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A hyper-parameter, shape or option that no algorithm accepts (Python: `ValueError`).
    #[error("{0}")]
    Value(String),
    /// The same of a parameter, by its number (Python: `ValueError`).
    #[error("parameter {index}: {what}")]
    Param {
        /// Index of the parameter.
        index: usize,
        /// Description of what is not accepted, and a hint.
        what: String,
    },
    /// An object of the wrong kind (Python: `TypeError`).
    #[error("{0}")]
    Type(String),
    /// A sharding that cannot be lowered (Python: `oxidion.LayoutError`).
    #[error("{param}: {what}. {help}")]
    Layout {
        /// Name of the parameter.
        param: String,
        /// Description of the sharding or shape found, against the one expected.
        what: String,
        /// Hint: the call or setting that the user can change.
        help: String,
    },
    /// Ranks that disagree about the plan (Python: `oxidion.PlanMismatch`).
    #[error("{0}")]
    PlanMismatch(String),
    /// A call that has to wait for another one (Python: `RuntimeError`).
    #[error("{0}")]
    Mode(String),
    /// A second step while one is running (Python: `RuntimeError`).
    #[error("another step of this optimizer is running: step it from one thread at a time")]
    Busy,
    /// A broken promise inside the core (Python: `RuntimeError`).
    #[error("internal error: {0}. Please report it with the output of `python -m oxidion env`.")]
    Internal(String),
    /// Exception that a function of the user raised (Python: the same exception).
    #[error("{0}")]
    Foreign(Box<dyn std::error::Error + Send + Sync>),
    /// Failure of a CUDA device or its driver (Python: `RuntimeError`).
    #[error("CUDA: {0}")]
    Cuda(String),
    /// libtorch refused an operation (Python: `RuntimeError`).
    #[error("libtorch: {0}")]
    Torch(#[from] tch::TchError),
}

impl Error {
    /// The error with the name of the parameter that it is about, for one about a value.
    #[must_use]
    pub fn of(self, param: &str) -> Self {
        match self {
            Self::Value(text) => Self::Value(format!("{param}: {text}")),
            other => other,
        }
    }

    /// The error with the name of the parameter, for one that has its number.
    #[must_use]
    pub fn named<'a>(self, name: impl FnOnce(usize) -> &'a str) -> Self {
        match self {
            Self::Param { index, what } => Self::Value(what).of(name(index)),
            other => other,
        }
    }
}
