//! The op set of hybrid models as one trait, [`Backend`], and its implementations.
//!
//! [`Reference`] is scalar and plain, in f64 or f32: what the others are compared with. [`Cpu`]
//! packs weights at load and chooses its instruction set at run time. Unsafe code lives in this
//! crate alone, in the SIMD kernels.

mod backend;
mod cpu;
mod host;
mod reference;
mod scan_checks;

pub use backend::{
    Activation, AttentionRows, AttentionShape, Backend, ChannelGate, Cols, ConvFold, ConvStep, Decay, DeviceTensor,
    Expert, Fold, Form, GRID, GatedNorm, HeadCols, KvShape, MlpForm, Positions, RopeSpec, RouteSpec, ScanInputs,
    ScanShape, Score, Span, Step, Turn, Write,
};
pub use cpu::{Cpu, Isa, KEY_BLOCK};
pub use host::{part_from_host, part_to_host};
pub use reference::Reference;
