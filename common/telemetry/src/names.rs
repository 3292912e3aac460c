//! Names of everything exported.
//!
//! Owns each metric's and span's name, unit, description and keys. What can go wrong: a renamed metric breaks
//! dashboards, and the generated table in `deploy/metrics.md` must be written anew.

/// Kind of an instrument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// Only grows.
    Counter,
    /// A distribution.
    Histogram,
    /// Read at the time of the export.
    Gauge,
    /// Only grows; counted by somebody else, and read at the time of the export.
    Observed,
}

impl MetricKind {
    /// The kind in lower case.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Counter | Self::Observed => "counter",
            Self::Histogram => "histogram",
            Self::Gauge => "gauge",
        }
    }
}

/// One metric.
#[derive(Debug, PartialEq, Eq)]
pub struct MetricSpec {
    /// OpenTelemetry name.
    pub name: &'static str,
    /// Unit in UCUM.
    pub unit: &'static str,
    /// Kind of the instrument.
    pub kind: MetricKind,
    /// What is measured.
    pub description: &'static str,
    /// Keys of the labels.
    pub labels: &'static [&'static str],
}

/// One span.
#[derive(Debug)]
pub struct SpanSpec {
    /// Name of the span.
    pub name: &'static str,
    /// What the span covers.
    pub description: &'static str,
    /// Keys of the attributes.
    pub attributes: &'static [&'static str],
}

macro_rules! metrics {
    ($($id:ident: $kind:ident $name:literal $unit:literal $text:literal $labels:expr;)+) => {
        $(
            #[doc = $text]
            pub static $id: MetricSpec = MetricSpec {
                name: $name, unit: $unit, kind: MetricKind::$kind, description: $text, labels: &$labels,
            };
        )+
        /// Every metric.
        pub static METRICS: &[&MetricSpec] = &[$(&$id),+];
    };
}

metrics! {
    REQUESTS: Counter "hypic.requests" "{request}" "Requests that ended" ["protocol", "outcome"];
    REQUEST_DURATION: Histogram "hypic.request.duration" "s" "Time from a request's arrival to its end" ["mode"];
    FIRST_TOKEN: Histogram "hypic.request.time_to_first_token" "s" "Time from arrival to the first token" ["mode"];
    OUTPUT_TOKEN: Histogram "hypic.request.time_per_output_token" "s" "Mean time between a request's tokens" [];
    STAGE_DURATION: Histogram "hypic.stage.duration" "s" "Time in a stage of a request" ["stage"];
    SEGMENTS: Counter "hypic.segments" "{segment}" "Segments by the source of their state" ["source"];
    TOKENS: Counter "hypic.tokens" "{token}" "Tokens by how they were handled" ["class"];
    CACHE_BYTES: Gauge "hypic.cache.size" "By" "Bytes held by the cache" [];
    CACHE_ENTRIES: Gauge "hypic.cache.entries" "{entry}" "Entries held by the cache" [];
    CACHE_PINNED: Gauge "hypic.cache.pinned" "By" "Bytes of cached entries that are in use" [];
    CACHE_FLIGHTS: Gauge "hypic.cache.flights" "{entry}" "Entries that are being computed or received" [];
    EVICTIONS: Observed "hypic.cache.evictions" "{entry}" "Entries dropped from the cache" ["reason"];
    SEQUENCES: Gauge "hypic.sequences" "{sequence}" "Sequences by state" ["state"];
    SEQUENCE_BYTES: Gauge "hypic.sequences.size" "By" "Bytes of the running states of sequences" [];
    WAITING: Gauge "hypic.requests.waiting" "{request}" "Requests that wait for a place" [];
    REQUESTS_OPEN: Gauge "hypic.requests.open" "{request}" "Requests of clients that a router answers now" [];
    PLANS_OPEN: Gauge "hypic.plans.open" "{plan}" "Plans of a router that combiners carry out now" [];
    JOBS_OUT: Gauge "hypic.jobs.out" "{job}" "Prefill jobs that a router gave out and has not heard the end of" [];
    BACKLOG: Gauge "hypic.backlog" "ms" "Estimated time of the work that a router gave workers and they have not done" [];
    JOBS: Gauge "hypic.jobs" "{job}" "Prefill jobs of a worker, or of a combiner's last resort, by state" ["state"];
    JOB_TOKENS: Gauge "hypic.jobs.tokens" "{token}" "Tokens that a worker has still to prefill" [];
    DELIVERIES: Gauge "hypic.deliveries.open" "{transfer}" "Transfers that a worker sends now" [];
    CALLS: Gauge "hypic.calls.open" "{call}" "Calls that a worker or combiner serves now, standing ones aside" [];
    MEMBERS: Gauge "hypic.members.up" "{member}" "Members that are up" ["role"];
    MISMATCHES: Observed "hypic.members.mismatches" "{member}" "Members refused for a differing field" ["field"];
    BREAKERS: Gauge "hypic.breakers" "{breaker}" "Circuit breakers by state" ["state"];
    RETRIES: Counter "hypic.retries" "{attempt}" "Attempts repeated after a failure" ["kind"];
    HEDGES: Counter "hypic.hedges" "{attempt}" "Second attempts raced against a slow first" ["kind"];
    FAILOVERS: Counter "hypic.failovers" "{request}" "Requests moved after their combiner was lost" [];
    LAST_RESORT: Counter "hypic.prefills.last_resort" "{segment}" "Segments the combiner had to prefill itself" [];
    TRANSFER_BYTES: Counter "hypic.transfer.io" "By" "Bytes of state received" [];
    TRANSFER_FAILURES: Counter "hypic.transfer.failures" "{transfer}" "Transfers that failed" ["reason"];
    TRANSFERS_OPEN: Gauge "hypic.transfers.open" "{transfer}" "Transfers under way" [];
    TRANSFER_HIDDEN: Histogram "hypic.transfer.hidden" "1" "Share of a computed entry's bytes that were on their way before its last part was final, 0 to 1" [];
    REJECTIONS: Counter "hypic.rejections" "{request}" "Requests turned away" ["reason"];
    DISCONNECTS: Counter "hypic.disconnects" "{request}" "Requests whose client went away" ["phase"];
    MAKESPAN_BOUND: Counter "hypic.segments.makespan_bound" "{segment}" "Segments as long as the makespan alone" [];
    REPLICATIONS: Counter "hypic.replications" "{entry}" "Hot entries that one more combiner was given" [];
    DIRECTORY_ENTRIES: Gauge "hypic.directory.entries" "{entry}" "Entries of the directory of cached segments" [];
}

macro_rules! spans {
    ($($id:ident $name:literal $text:literal $attributes:expr;)+) => {
        $(#[doc = $text] pub const $id: &str = $name;)+
        /// Every span.
        pub static SPANS: &[SpanSpec] =
            &[$(SpanSpec { name: $name, description: $text, attributes: &$attributes }),+];
    };
}

/// Attribute: the request's id, made by the server.
pub const ATTRIBUTE_REQUEST: &str = "hypic.request_id";
/// Attribute: how the prompt is prefilled.
pub const ATTRIBUTE_MODE: &str = "hypic.mode";
/// Attribute: number of tokens.
pub const ATTRIBUTE_TOKENS: &str = "hypic.tokens";
/// Attribute: number of segments.
pub const ATTRIBUTE_SEGMENTS: &str = "hypic.segments";
/// Attribute: number of bytes.
pub const ATTRIBUTE_BYTES: &str = "hypic.bytes";
/// Attribute: id of the other member.
pub const ATTRIBUTE_MEMBER: &str = "hypic.member";

spans! {
    SPAN_REQUEST "request" "A request, from arrival to its last byte" [ATTRIBUTE_REQUEST, ATTRIBUTE_MODE];
    SPAN_QUEUE "queue" "The wait for a place" [];
    SPAN_TOKENIZE "tokenize" "Text to tokens" [ATTRIBUTE_TOKENS];
    SPAN_PLAN "plan" "The split into segments and the choice of members" [ATTRIBUTE_SEGMENTS];
    SPAN_SCATTER "scatter" "Prefill of one segment on a worker" [ATTRIBUTE_MEMBER, ATTRIBUTE_TOKENS];
    SPAN_TRANSFER "transfer" "State of one segment on its way" [ATTRIBUTE_MEMBER, ATTRIBUTE_BYTES];
    SPAN_COMPOSE "compose" "Segments' states to one state" [ATTRIBUTE_SEGMENTS, ATTRIBUTE_TOKENS];
    SPAN_DECODE "decode" "Generation of the completion" [ATTRIBUTE_TOKENS];
}
