//! What the roles say to each other, and how layer parts move between them.
//!
//! The router speaks to scatter workers through [`Scatter`] and to combiners through [`Combine`]; layer
//! parts go from a worker to a combiner without passing it, under a [`TransferId`] that the router drew.
//! Here is the transport within one process, [`Exchange`], which passes parts by reference.
#![forbid(unsafe_code)]

mod exchange;
mod roles;
mod sampling;

pub use exchange::{Exchange, Incoming, Transfer, TransferId, Transfers};
pub use roles::{
    ChoiceEnd, Combine, CombineError, GenerationEvent, Hold, JobError, JobOutcome, JobSource, Plan, PlanSegment,
    PrefillJob, PrefixHit, SavePoint, Scatter, SegmentBody, TokenEvent, panic_text,
};
pub use sampling::{LOGIT_BIAS, PENALTY, SamplingError, SamplingParams, TEMPERATURE};
