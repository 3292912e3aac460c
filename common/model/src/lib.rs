//! Hybrid-attention models: checkpoints, families, layers, and the pass that serves them.
//!
//! Where to look: a family's dimensions and tensor names are in `families/`; what a layer does with
//! rows is in `layers/`; [`Pass`] is the one walk behind prefill, composition and decoding: T is made in
//! the fold of a captured sequence, and applied in the fold of a sequence that jumps.
#![forbid(unsafe_code)]

mod checkpoint;
mod config;
mod error;
pub mod families;
mod info;
mod layers;
mod model;
mod pass;
mod prefill;
mod running;
pub mod spec;

pub use checkpoint::Checkpoint;
pub use config::Config;
pub use error::ModelError;
pub use info::ModelInfo;
pub use layers::Workspace;
pub use model::{LoadOptions, Model};
pub use pass::{
    Capture, Item, Jump, Logits, PartSink, Pass, PassError, PassOutput, Progress, Sequence, SequenceOutput,
};
pub use prefill::{Prefill, split_items};
pub use running::{FrozenState, RunningState};
pub use spec::{DynamicNtk, ModelSpec};
