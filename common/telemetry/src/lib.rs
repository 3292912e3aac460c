//! Metrics, traces and logs of a process.
//!
//! Owns what a process exports and how: names, instruments, exporters and trace context. What can go wrong: a receiver
//! that is slow, dead or silent. It costs exported data, never a request's time nor the shutdown's.
#![forbid(unsafe_code)]

mod config;
mod document;
mod labels;
mod metrics;
pub mod names;
mod open;
mod propagation;
mod start;
#[cfg(test)]
mod tests;

pub use config::{LogFormat, TelemetryConfig};
pub use document::document;
pub use labels::{
    AttemptKind, BreakerState, DisconnectPhase, EvictionReason, JobState, LABEL_SETS, Label, MemberRole, MismatchField,
    Mode, Outcome, Protocol, Rejection, SegmentSource, SequenceState, Stage, TokenClass, TransferFailure,
};
pub use metrics::{Metrics, Observation, metrics, observe};
pub use open::{Open, OpenGuard};
pub use propagation::{adopt, adopt_metadata, adopt_text, extract, extract_metadata, inject_current, traceparent};
pub use start::{Telemetry, TelemetryError};
