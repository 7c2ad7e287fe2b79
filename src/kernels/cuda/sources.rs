//! Sources of kernels, each compiled to one module.

use std::borrow::Cow;
use std::collections::BTreeMap;

/// One source: its kernels become one module.
#[derive(Debug)]
pub struct Source {
    /// File name.
    pub(in crate::kernels) name: &'static str,
    pub(in crate::kernels) text: &'static str,
    /// Its kernels: each of these, with each of `forms` behind it where they have a name.
    pub(in crate::kernels) stems: fn() -> Vec<&'static str>,
    pub(in crate::kernels) forms: &'static [&'static str],
    /// Bytes of shared memory that a block may ask for when it is launched.
    pub(in crate::kernels) shared: u32,
    pub(in crate::kernels) when: When,
    /// Time that NVRTC takes to compile it on one core.
    pub(in crate::kernels) seconds: f64,
}

/// When a source is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::kernels) enum When {
    /// With the first step.
    Always,
    /// With the first step of parameters or states that are more than numbers of their type.
    Encoded,
    /// With the first step on devices of this architecture; others cannot run it.
    On(&'static str),
}

/// Sources with the headers that they include.
#[derive(Debug)]
pub struct Sources {
    pub(in crate::kernels) all: &'static [&'static Source],
    /// By the name under which they are included, in its order.
    pub(in crate::kernels) headers: Vec<(&'static str, Cow<'static, str>)>,
    /// By the name of each kernel that of its source.
    kernels: BTreeMap<String, &'static str>,
}

impl Sources {
    /// The source by its name.
    pub(in crate::kernels) fn named(&self, name: &str) -> Option<&'static Source> {
        self.all.iter().find(|source| source.name == name).copied()
    }

    /// Name of the source that a kernel is from, by the kernel's whole name.
    pub(in crate::kernels) fn of_kernel(&self, kernel: &str) -> Option<&'static str> {
        self.kernels.get(kernel).copied()
    }

    /// Sources with their headers, in the order of their names.
    pub(in crate::kernels) fn new(
        all: &'static [&'static Source],
        headers: Vec<(&'static str, Cow<'static, str>)>,
    ) -> Self {
        let of = |source: &&'static Source| {
            source.kernels().map(|kernel| (kernel, source.name)).collect::<Vec<_>>()
        };
        Self { all, headers, kernels: all.iter().flat_map(of).collect() }
    }
}

impl Source {
    /// The names of its kernels.
    pub(in crate::kernels) fn kernels(&self) -> impl Iterator<Item = String> {
        let name = |stem: &str, form: &str| {
            if form.is_empty() { String::from(stem) } else { format!("{stem}_{form}") }
        };
        (self.stems)().into_iter().flat_map(move |stem| self.forms.iter().map(move |form| name(stem, form)))
    }
}
