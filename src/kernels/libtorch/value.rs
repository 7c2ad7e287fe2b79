//! Numbers and tensors in one kind of expression, so that a formula is written once for what the host knows and for what is
//! on a device. A failure goes through to the end of the formula.

use std::ops::{Add, Div, Mul, Neg, Sub};

use tch::{Device, Kind, TchError, Tensor};

use crate::error::{Error, Result};
use crate::kernels::backend;

/// A number of the host, or a tensor: of one number, or of as many as an operand has.
#[derive(Debug)]
pub(in crate::kernels) enum Value {
    /// A number that the host knows.
    Scalar(f64),
    /// Numbers on the device of the operands.
    Computed(Tensor),
    /// libtorch has refused a part of the formula.
    Failed(String),
}

use Value::{Computed, Failed, Scalar};

impl Clone for Value {
    fn clone(&self) -> Self {
        match self {
            Scalar(x) => Scalar(*x),
            Computed(x) => Computed(x.shallow_clone()),
            Failed(text) => Failed(text.clone()),
        }
    }
}

impl From<std::result::Result<Tensor, TchError>> for Value {
    fn from(found: std::result::Result<Tensor, TchError>) -> Self {
        match found {
            Ok(x) => Computed(x),
            Err(error) => Failed(error.to_string()),
        }
    }
}

impl Value {
    /// The tensor, like another one where the host knows the number.
    pub(in crate::kernels) fn tensor(&self, like: &Tensor) -> Result<Tensor> {
        match self {
            Scalar(x) => scalar(*x, like).map_err(Error::from),
            Computed(x) => Ok(x.shallow_clone()),
            Failed(text) => Err(failure(text)),
        }
    }

    /// A function of tensors, and of numbers that the host knows.
    fn map(
        &self,
        known: impl Fn(f64) -> f64,
        there: impl Fn(&Tensor) -> std::result::Result<Tensor, TchError>,
    ) -> Self {
        match self {
            Scalar(x) => Scalar(known(*x)),
            Computed(x) => there(x).into(),
            Failed(text) => Failed(text.clone()),
        }
    }

    /// Applies a function of two values: `known` if the host knows both, else `there`.
    fn with(
        &self,
        other: &Self,
        known: impl Fn(f64, f64) -> f64,
        there: impl Fn(&Tensor, &Tensor) -> std::result::Result<Tensor, TchError>,
    ) -> Self {
        match (self, other) {
            (Failed(text), _) | (_, Failed(text)) => Failed(text.clone()),
            (Scalar(a), Scalar(b)) => Scalar(known(*a, *b)),
            (Scalar(a), Computed(b)) => scalar(*a, b).and_then(|a| there(&a, b)).into(),
            (Computed(a), Scalar(b)) => scalar(*b, a).and_then(|b| there(a, &b)).into(),
            (Computed(a), Computed(b)) => there(a, b).into(),
        }
    }

    pub(in crate::kernels) fn sqrt(&self) -> Self {
        self.map(f64::sqrt, Tensor::f_sqrt)
    }

    pub(in crate::kernels) fn exp(&self) -> Self {
        self.map(f64::exp, Tensor::f_exp)
    }

    pub(in crate::kernels) fn square(&self) -> Self {
        self.map(|x| x * x, Tensor::f_square)
    }

    /// The natural logarithm of a number that the host knows.
    pub(in crate::kernels) fn ln(&self) -> Self {
        match self {
            Scalar(x) => Scalar(x.ln()),
            Computed(_) => Failed("there is no logarithm of numbers on a device".into()),
            Failed(text) => Failed(text.clone()),
        }
    }

    /// `base` to the power of this.
    pub(in crate::kernels) fn power_of(&self, base: f64) -> Self {
        self.map(|x| base.powf(x), |x| x.f_to_kind(Kind::Double)?.f_mul_scalar(base.ln())?.f_exp())
    }

    /// This to a power that the host knows.
    pub(in crate::kernels) fn to_the(&self, exponent: f64) -> Self {
        self.map(|x| x.powf(exponent), |x| x.f_pow_tensor_scalar(exponent))
    }

    pub(in crate::kernels) fn max(&self, other: &Self) -> Self {
        self.with(other, f64::max, Tensor::f_fmax)
    }

    pub(in crate::kernels) fn min(&self, other: &Self) -> Self {
        self.with(other, f64::min, Tensor::f_fmin)
    }

    /// In float64.
    pub(in crate::kernels) fn wide(&self) -> Self {
        self.map(|x| x, |x| x.f_to_kind(Kind::Double))
    }

    /// The sum of all elements in float64.
    pub(in crate::kernels) fn sum(&self) -> Self {
        self.map(|x| x, |x| x.f_sum(Kind::Double))
    }

    /// Returns 1 where this is below the other, else 0 (also where one of them is NaN).
    pub(in crate::kernels) fn below(&self, other: &Self) -> Self {
        self.with(other, |a, b| f64::from(u8::from(a < b)), Tensor::f_lt_tensor)
    }

    /// 1 where this is at most the other, else 0.
    pub(in crate::kernels) fn at_most(&self, other: &Self) -> Self {
        self.with(other, |a, b| f64::from(u8::from(a <= b)), Tensor::f_le_tensor)
    }

    /// `yes` where this is 1, else `no`.
    pub(in crate::kernels) fn choose(&self, yes: &Self, no: &Self) -> Self {
        let mask = match self {
            Scalar(x) => return if *x == 0.0 { no.clone() } else { yes.clone() },
            Failed(text) => return Failed(text.clone()),
            Computed(mask) => mask,
        };
        yes.with_tensors(no, mask, |yes, no| yes.f_where_self(mask, no))
    }

    /// A function of two as tensors, even where the host knows both.
    fn with_tensors(
        &self,
        other: &Self,
        like: &Tensor,
        there: impl Fn(&Tensor, &Tensor) -> std::result::Result<Tensor, TchError>,
    ) -> Self {
        match (self, other) {
            (Failed(text), _) | (_, Failed(text)) => Failed(text.clone()),
            (Scalar(a), Scalar(b)) => {
                let wide = |x: f64| Tensor::f_scalar_tensor(x, (Kind::Double, like.device()));
                wide(*a).and_then(|a| there(&a, &wide(*b)?)).into()
            }
            _ => self.with(other, |a, _| a, there),
        }
    }
}

/// Error of a formula that failed.
fn failure(text: &str) -> Error {
    Error::Torch(TchError::Torch(text.to_owned()))
}

/// The elements of a tensor in memory of their own.
pub(in crate::kernels) fn copied(x: &Tensor) -> std::result::Result<Tensor, TchError> {
    let mut copy = x.f_empty_like()?;
    copy.f_copy_(x)?;
    Ok(copy)
}

/// Returns a number as a scalar tensor on the device of `like`: float32 if that is float32, else float64.
fn scalar(x: f64, like: &Tensor) -> std::result::Result<Tensor, TchError> {
    let kind = match like.f_kind()? {
        Kind::Float => Kind::Float,
        _ => Kind::Double,
    };
    let device: Device = like.device();
    Tensor::f_scalar_tensor(x, (kind, device))
}

macro_rules! operator {
    ($name:ident, $function:ident, $known:expr, $there:path) => {
        impl $name<&Value> for &Value {
            type Output = Value;
            fn $function(self, other: &Value) -> Value {
                self.with(other, $known, $there)
            }
        }
        impl $name<Value> for &Value {
            type Output = Value;
            fn $function(self, other: Value) -> Value {
                self.$function(&other)
            }
        }
        impl $name<&Value> for Value {
            type Output = Value;
            fn $function(self, other: &Value) -> Value {
                (&self).$function(other)
            }
        }
        impl $name<Value> for Value {
            type Output = Value;
            fn $function(self, other: Value) -> Value {
                (&self).$function(&other)
            }
        }
        impl $name<f64> for &Value {
            type Output = Value;
            fn $function(self, other: f64) -> Value {
                self.$function(&Scalar(other))
            }
        }
        impl $name<f64> for Value {
            type Output = Value;
            fn $function(self, other: f64) -> Value {
                (&self).$function(&Scalar(other))
            }
        }
        impl $name<&Value> for f64 {
            type Output = Value;
            fn $function(self, other: &Value) -> Value {
                (&Scalar(self)).$function(other)
            }
        }
        impl $name<Value> for f64 {
            type Output = Value;
            fn $function(self, other: Value) -> Value {
                (&Scalar(self)).$function(&other)
            }
        }
    };
}
operator!(Add, add, |a, b| a + b, Tensor::f_add);
operator!(Sub, sub, |a, b| a - b, Tensor::f_sub);
operator!(Mul, mul, |a, b| a * b, Tensor::f_mul);
operator!(Div, div, |a, b| a / b, Tensor::f_div);

impl Neg for Value {
    type Output = Self;
    fn neg(self) -> Self {
        self.map(|x| -x, Tensor::f_neg)
    }
}

/// `β·old + (1-β)·new`, exact at both ends, as [`crate::kernels::ops::lerp::Lerp`] has it.
pub(in crate::kernels) fn lerp(beta: &Value, old: &Value, new: &Value) -> Value {
    let towards_new = beta.at_most(&Scalar(0.5));
    let weight = towards_new.choose(beta, &(1.0 - beta));
    let (near, far) = (towards_new.choose(new, old), towards_new.choose(old, new));
    &near + (&weight * &far - &weight * &near)
}

/// The learning rate that is on the device, as a number there; 1 where there is none.
pub(in crate::kernels) fn followed_rate() -> Result<Value> {
    let Some(rate) = backend::rate() else { return Ok(Value::Scalar(1.0)) };
    Ok(rate.tensor(&[])?.f_to_kind(Kind::Double).into())
}
