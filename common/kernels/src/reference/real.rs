//! The working precisions, f32 and f64, and the few functions that the ops need of them. Rounding to a narrower
//! dtype lives here alone.

use std::fmt::Debug;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

use half::{bf16, f16};
use hypic_state::{DType, HostTensor};

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

/// The working precision of a [`Reference`](super::Reference): f32 or f64.
pub trait Real:
    Copy
    + Debug
    + PartialOrd
    + Add<Output = Self>
    + AddAssign
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + Sum
    + Send
    + Sync
    + 'static
    + sealed::Sealed
{
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// Not a number: what poisoned memory holds.
    const NAN: Self;
    /// Element type of downloads.
    const DTYPE: DType;

    /// The nearest value to `x`.
    fn from_f64(x: f64) -> Self;
    /// The value, exactly.
    fn to_f64(self) -> f64;
    /// `e^self`.
    fn exp(self) -> Self;
    /// `ln(1 + self)`.
    fn ln_1p(self) -> Self;
    /// Square root.
    fn sqrt(self) -> Self;
    /// The nearest value that `dtype` can hold; the value itself if `dtype` is wider.
    fn round_to(self, dtype: DType) -> Self;
    /// The elements of `t`.
    fn read(t: &HostTensor) -> Vec<Self>;
    /// A tensor of `values`.
    fn host(shape: &[usize], values: &[Self]) -> HostTensor;

    /// `1 / (1 + exp(-x))` without overflow.
    fn sigmoid(self) -> Self {
        if self < Self::ZERO {
            let e = self.exp();
            e / (Self::ONE + e)
        } else {
            Self::ONE / (Self::ONE + (-self).exp())
        }
    }

    /// `x * sigmoid(x)`.
    fn silu(self) -> Self {
        self * self.sigmoid()
    }

    /// `ln(1 + exp(x))` without overflow.
    fn softplus(self) -> Self {
        if self > Self::ZERO { self + (-self).exp().ln_1p() } else { self.exp().ln_1p() }
    }
}

impl Real for f64 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const NAN: Self = f64::NAN;
    const DTYPE: DType = DType::F64;

    fn from_f64(x: f64) -> Self {
        x
    }

    fn to_f64(self) -> f64 {
        self
    }

    fn exp(self) -> Self {
        f64::exp(self)
    }

    fn ln_1p(self) -> Self {
        f64::ln_1p(self)
    }

    fn sqrt(self) -> Self {
        f64::sqrt(self)
    }

    fn round_to(self, dtype: DType) -> Self {
        match dtype {
            DType::F64 => self,
            DType::F32 => f64::from(self as f32),
            // By way of f32: the direct conversions of `half` drop low bits before they decide ties.
            DType::Bf16 => bf16::from_f32(self as f32).to_f64(),
            DType::F16 => f16::from_f32(self as f32).to_f64(),
        }
    }

    fn read(t: &HostTensor) -> Vec<Self> {
        t.to_f64()
    }

    fn host(shape: &[usize], values: &[Self]) -> HostTensor {
        HostTensor::from_f64(shape, values)
    }
}

impl Real for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const NAN: Self = f32::NAN;
    const DTYPE: DType = DType::F32;

    fn from_f64(x: f64) -> Self {
        x as f32
    }

    fn to_f64(self) -> f64 {
        f64::from(self)
    }

    fn exp(self) -> Self {
        f32::exp(self)
    }

    fn ln_1p(self) -> Self {
        f32::ln_1p(self)
    }

    fn sqrt(self) -> Self {
        f32::sqrt(self)
    }

    fn round_to(self, dtype: DType) -> Self {
        match dtype {
            DType::F64 | DType::F32 => self,
            DType::Bf16 => bf16::from_f32(self).to_f32(),
            DType::F16 => f16::from_f32(self).to_f32(),
        }
    }

    fn read(t: &HostTensor) -> Vec<Self> {
        t.to_f32()
    }

    fn host(shape: &[usize], values: &[Self]) -> HostTensor {
        HostTensor::from_f32(shape, values)
    }
}
