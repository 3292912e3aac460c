//! The closed sets of label values.
//!
//! Owns every value a label can take. A value is a constant of this module, so no text of a request can become a
//! series. What can go wrong: a new case without a variant here must be added here, never passed as text.

use opentelemetry::KeyValue;

/// A label with a value of a closed set; made only from the enums of this module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label {
    key: &'static str,
    value: &'static str,
}

impl Label {
    /// The label's key.
    pub fn key(self) -> &'static str {
        self.key
    }
    /// The label's value.
    pub fn value(self) -> &'static str {
        self.value
    }
}

impl From<Label> for KeyValue {
    fn from(label: Label) -> Self {
        KeyValue::new(label.key, label.value)
    }
}

macro_rules! label_sets {
    ($($(#[$doc:meta])* $set:ident = $key:literal { $($variant:ident = $text:literal),+ $(,)? })+) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
            pub enum $set { $(#[doc = concat!("`", $text, "`")] $variant,)+ }

            impl $set {
                /// The label key of the set.
                pub const KEY: &'static str = $key;
                /// Every value of the set.
                pub const ALL: &'static [Self] = &[$(Self::$variant),+];
                /// The value as exported.
                pub const fn as_str(self) -> &'static str {
                    match self { $(Self::$variant => $text,)+ }
                }
            }

            impl From<$set> for Label {
                fn from(value: $set) -> Self {
                    Label { key: $set::KEY, value: value.as_str() }
                }
            }
        )+
        /// Every label key with its values.
        pub const LABEL_SETS: &[(&str, &[&str])] = &[$(($key, &[$($text),+])),+];
    };
}

label_sets! {
    /// What the client speaks.
    Protocol = "protocol" { Http = "http", Grpc = "grpc" }
    /// How a request ended.
    Outcome = "outcome" {
        Ok = "ok", Invalid = "invalid", Rejected = "rejected", Disconnected = "disconnected", TimedOut = "timed_out",
        Unavailable = "unavailable", Failed = "failed",
    }
    /// How the prompt is prefilled.
    Mode = "mode" { Exact = "exact", Composed = "composed" }
    /// A stage of a request.
    Stage = "stage" {
        Queue = "queue", Tokenize = "tokenize", Plan = "plan", Scatter = "scatter", Transfer = "transfer",
        Compose = "compose", Decode = "decode",
    }
    /// Where a segment's state came from.
    SegmentSource = "source" {
        Computed = "computed", Memory = "memory", Remote = "remote", Prefix = "prefix", SeamOnly = "seam_only",
    }
    /// How a token was handled.
    TokenClass = "class" {
        Exact = "exact", Composed = "composed", Seam = "seam", Computed = "computed", Completion = "completion",
    }
    /// Why a cache entry was dropped.
    EvictionReason = "reason" { Capacity = "capacity", Prefix = "prefix", Boundary = "boundary" }
    /// What a sequence is doing.
    SequenceState = "state" { Waiting = "waiting", Prefilling = "prefilling", Decoding = "decoding" }
    /// How far a prefill job is.
    JobState = "state" { Waiting = "waiting", Computing = "computing" }
    /// State of a member's circuit breaker.
    BreakerState = "state" { Closed = "closed", Open = "open", HalfOpen = "half_open" }
    /// Role of a member.
    MemberRole = "role" { Router = "router", ScatterWorker = "scatter_worker", Combiner = "combiner" }
    /// Why a transfer failed.
    TransferFailure = "reason" {
        Checksum = "checksum", TimedOut = "timed_out", Disconnected = "disconnected", Missing = "missing",
        Cancelled = "cancelled", Other = "other",
    }
    /// Why a request was turned away.
    Rejection = "reason" {
        QueueFull = "queue_full", Deadline = "deadline", TooLong = "too_long", NoMember = "no_member",
        Draining = "draining", Unauthenticated = "unauthenticated",
    }
    /// When the client went away.
    DisconnectPhase = "phase" { Queued = "queued", Prefill = "prefill", Decode = "decode" }
    /// What was tried again, or raced against a second member.
    AttemptKind = "kind" { Scatter = "scatter", Transfer = "transfer", Compose = "compose" }
    /// The field in which a member differs from the cluster.
    MismatchField = "field" {
        Id = "id", Role = "role", Fingerprint = "model_fingerprint", Dtype = "dtype", KernelSet = "kernel_set",
        Format = "format_version", Protocol = "protocol",
    }
}
