//! The combiner: folds entries into running states, decodes, samples.
//!
//! [`Combiner`] takes plans; a thread of its own owns the device. Between two decoding steps of all
//! answers it advances the prompts that are being composed, layer by layer.
#![forbid(unsafe_code)]

mod combiner;
mod device;
mod prefix;
mod prompt;
mod sampler;

pub use combiner::{Combiner, CombinerConfig, CombinerLoad};
pub use prefix::PrefixState;
pub use sampler::{Sampled, SampledLogprobs, Sampler};
