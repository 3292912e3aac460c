//! The dtype to compute in, as it is asked for on command lines and in settings. Any other name is refused with those
//! that there are.

use std::fmt;
use std::str::FromStr;

use hypic_state::DType;

/// The dtype to compute in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ComputeDType {
    /// The checkpoint's where the CPU has instructions for it, else f32.
    #[default]
    Auto,
    /// 32-bit floats.
    F32,
    /// bfloat16 weights and activations, 32-bit sums.
    Bf16,
}

impl ComputeDType {
    /// The dtype that is asked for; `None` for [`Auto`](Self::Auto).
    pub fn asked(self) -> Option<DType> {
        match self {
            ComputeDType::Auto => None,
            ComputeDType::F32 => Some(DType::F32),
            ComputeDType::Bf16 => Some(DType::Bf16),
        }
    }
}

impl fmt::Display for ComputeDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            ComputeDType::Auto => "auto",
            ComputeDType::F32 => "f32",
            ComputeDType::Bf16 => "bf16",
        })
    }
}

/// A name that is no dtype to compute in.
#[derive(Debug)]
pub struct UnknownDType(String);

impl fmt::Display for UnknownDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unknown dtype '{}': use auto, f32 or bf16", self.0)
    }
}

impl std::error::Error for UnknownDType {}

impl FromStr for ComputeDType {
    type Err = UnknownDType;

    fn from_str(text: &str) -> Result<Self, UnknownDType> {
        match text {
            "auto" => Ok(ComputeDType::Auto),
            "f32" => Ok(ComputeDType::F32),
            "bf16" => Ok(ComputeDType::Bf16),
            other => Err(UnknownDType(other.to_string())),
        }
    }
}
