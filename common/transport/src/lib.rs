//! What the roles say to each other, and how layer parts move between them.
//!
//! The router speaks to scatter workers through [`Scatter`] and to combiners through [`Combine`]; layer parts go from a
//! worker to a combiner without passing it, through a [`Transport`], under a [`TransferId`] that the router drew. An
//! [`Exchange`] is where they arrive, and the transport within one process; [`grpc`] joins processes.
#![forbid(unsafe_code)]

mod ahead;
mod exchange;
pub mod grpc;
mod roles;
mod sampling;
mod transport;

pub use ahead::{KvAhead, KvRange};
pub use exchange::{Exchange, Incoming, Refused, TransferId};
pub use roles::{
    ChoiceEnd, Combine, CombineError, CombineLoad, Delivery, GenerationEvent, JobError, JobOutcome, JobSource, Plan,
    PlanChoice, PlanSegment, PrefillJob, PrefixHit, SavePoint, Scatter, SegmentBody, TokenEvent, ToldBacklog,
    panic_text,
};
pub use sampling::{LOGIT_BIAS, PENALTY, SamplingError, SamplingParams, TEMPERATURE};
pub use transport::{Delivered, DeliveryError, Parcel, Transport};
