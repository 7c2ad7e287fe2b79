//! Defaults of group keys. They stand in the schemas of the Python classes, which hand them over when they are made.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::algorithm::FALLBACK;

/// By algorithm the keys that its groups may lack, with their values.
static TABLES: Mutex<BTreeMap<String, Py<PyDict>>> = Mutex::new(BTreeMap::new());

/// Takes the defaults of an algorithm's group keys.
#[pyfunction]
pub(super) fn set_defaults(algorithm: String, defaults: Py<PyDict>) {
    TABLES.lock().unwrap_or_else(PoisonError::into_inner).insert(algorithm, defaults);
}

/// The default of a key in groups of an algorithm, else in those of the algorithm that takes what others leave.
pub(super) fn find<'py>(py: Python<'py>, algorithm: &str, key: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
    for name in [algorithm, FALLBACK] {
        let table =
            TABLES.lock().unwrap_or_else(PoisonError::into_inner).get(name).map(|own| own.clone_ref(py));
        if let Some(value) = table.map(|table| table.bind(py).get_item(key)).transpose()?.flatten() {
            return Ok(Some(value));
        }
    }
    Ok(None)
}
