//! Typed recording.
//!
//! Owns the instruments and the functions that gauges read when exported. Recording never waits for an exporter.
//! What can go wrong: a gauge whose [`Observation`] was dropped is exported no more; that is meant.

use crate::labels::*;
use crate::names::{self, METRICS, MetricKind, MetricSpec};
use opentelemetry::metrics::{Counter, Histogram, Meter};
use opentelemetry::{KeyValue, global};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};
use std::time::Duration;

pub(crate) const SCOPE: &str = "hypic";
const SECONDS: [f64; 17] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0];
const SHARES: [f64; 10] = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0];

type Reading = Arc<dyn Fn() -> u64 + Send + Sync>;

struct Observed {
    id: u64,
    metric: &'static str,
    labels: Vec<Label>,
    read: Reading,
}

static OBSERVED: Mutex<Vec<Observed>> = Mutex::new(Vec::new());
static NEXT_ID: AtomicU64 = AtomicU64::new(0);
static INSTALLED: OnceLock<Metrics> = OnceLock::new();
static UNINSTALLED: LazyLock<Metrics> = LazyLock::new(|| Metrics::new(&global::meter(SCOPE)));

/// The process's metrics; they record nothing before [`crate::Telemetry::start`].
pub fn metrics() -> &'static Metrics {
    INSTALLED.get().unwrap_or_else(|| &UNINSTALLED)
}

pub(crate) fn install(metrics: Metrics) {
    // `start` runs once in a process, so the cell is empty here.
    let _ = INSTALLED.set(metrics);
}

/// Keeps a gauge's function alive; dropping it ends the function's share of the gauge.
#[must_use = "the gauge is exported only while this lives"]
#[derive(Debug)]
pub struct Observation {
    id: u64,
}

impl Drop for Observation {
    fn drop(&mut self) {
        let removed = {
            let mut observed = OBSERVED.lock();
            let at = observed.iter().position(|one| one.id == self.id);
            at.map(|at| observed.swap_remove(at))
        };
        // Dropped unlocked: what the function owns may itself hold an observation.
        drop(removed);
    }
}

/// Exports `read` as `metric`, a gauge or a count that is kept elsewhere, called at each export. Functions with equal
/// labels are added up.
///
/// # Panics
/// In debug builds, if `metric` is recorded instead of read, or the labels' keys are not those of its specification.
pub fn observe(
    metric: &'static MetricSpec,
    labels: &[Label],
    read: impl Fn() -> u64 + Send + Sync + 'static,
) -> Observation {
    debug_assert!(matches!(metric.kind, MetricKind::Gauge | MetricKind::Observed), "{} is recorded", metric.name);
    debug_assert!(
        labels.iter().map(|label| label.key()).eq(metric.labels.iter().copied()),
        "labels of {}",
        metric.name
    );
    let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
    OBSERVED.lock().push(Observed { id, metric: metric.name, labels: labels.to_vec(), read: Arc::new(read) });
    Observation { id }
}

fn readings(metric: &'static str) -> Vec<(Vec<KeyValue>, u64)> {
    let functions: Vec<(Vec<Label>, Reading)> = OBSERVED
        .lock()
        .iter()
        .filter(|one| one.metric == metric)
        .map(|one| (one.labels.clone(), one.read.clone()))
        .collect();
    let mut sums: HashMap<Vec<&'static str>, (Vec<KeyValue>, u64)> = HashMap::new();
    for (labels, read) in functions {
        let values = labels.iter().map(|label| label.value()).collect();
        let sum = sums.entry(values).or_insert_with(|| (labels.iter().map(|label| (*label).into()).collect(), 0));
        sum.1 = sum.1.saturating_add(read());
    }
    sums.into_values().collect()
}

macro_rules! instruments {
    (counters { $($counter:ident = $counter_spec:ident),+ $(,)? } histograms { $($histogram:ident = $histogram_spec:ident, $bounds:ident);+ $(;)? }) => {
        /// The instruments.
        #[derive(Debug)]
        pub struct Metrics { $($counter: Counter<u64>,)+ $($histogram: Histogram<f64>,)+ }

        impl Metrics {
            pub(crate) fn new(meter: &Meter) -> Self {
                for spec in METRICS.iter().filter(|spec| spec.kind == MetricKind::Gauge) {
                    meter
                        .u64_observable_gauge(spec.name)
                        .with_unit(spec.unit)
                        .with_description(spec.description)
                        .with_callback(|observer| {
                            for (labels, value) in readings(spec.name) {
                                observer.observe(value, &labels);
                            }
                        })
                        .build();
                }
                for spec in METRICS.iter().filter(|spec| spec.kind == MetricKind::Observed) {
                    meter
                        .u64_observable_counter(spec.name)
                        .with_unit(spec.unit)
                        .with_description(spec.description)
                        .with_callback(|observer| {
                            for (labels, value) in readings(spec.name) {
                                observer.observe(value, &labels);
                            }
                        })
                        .build();
                }
                Self {
                    $($counter: counter(meter, &names::$counter_spec),)+
                    $($histogram: histogram(meter, &names::$histogram_spec, &$bounds),)+
                }
            }
        }
    };
}

instruments! {
    counters {
        requests = REQUESTS, segments = SEGMENTS, tokens = TOKENS,
        retries = RETRIES, hedges = HEDGES, failovers = FAILOVERS, last_resort = LAST_RESORT,
        transfer_bytes = TRANSFER_BYTES, transfer_failures = TRANSFER_FAILURES, rejections = REJECTIONS,
        disconnects = DISCONNECTS, makespan_bound = MAKESPAN_BOUND, replications = REPLICATIONS,
    }
    histograms {
        request_duration = REQUEST_DURATION, SECONDS;
        first_token = FIRST_TOKEN, SECONDS;
        output_token = OUTPUT_TOKEN, SECONDS;
        stage = STAGE_DURATION, SECONDS;
        transfer_hidden = TRANSFER_HIDDEN, SHARES;
    }
}

fn counter(meter: &Meter, spec: &'static MetricSpec) -> Counter<u64> {
    debug_assert_eq!(spec.kind, MetricKind::Counter);
    meter.u64_counter(spec.name).with_unit(spec.unit).with_description(spec.description).build()
}

fn histogram(meter: &Meter, spec: &'static MetricSpec, bounds: &[f64]) -> Histogram<f64> {
    debug_assert_eq!(spec.kind, MetricKind::Histogram);
    let builder = meter.f64_histogram(spec.name).with_unit(spec.unit).with_description(spec.description);
    builder.with_boundaries(bounds.to_vec()).build()
}

fn key_value(label: impl Into<Label>) -> KeyValue {
    label.into().into()
}

impl Metrics {
    /// A request ended.
    pub fn request(&self, protocol: Protocol, outcome: Outcome) {
        self.requests.add(1, &[key_value(protocol), key_value(outcome)]);
    }
    /// Time from a request's arrival to its end.
    pub fn request_duration(&self, mode: Mode, time: Duration) {
        self.request_duration.record(time.as_secs_f64(), &[key_value(mode)]);
    }
    /// Time from a request's arrival to its first token.
    pub fn first_token(&self, mode: Mode, time: Duration) {
        self.first_token.record(time.as_secs_f64(), &[key_value(mode)]);
    }
    /// Mean time between a request's tokens.
    pub fn output_token(&self, time: Duration) {
        self.output_token.record(time.as_secs_f64(), &[]);
    }
    /// Time that a request spent in a stage.
    pub fn stage(&self, stage: Stage, time: Duration) {
        self.stage.record(time.as_secs_f64(), &[key_value(stage)]);
    }
    /// Segments whose state came from `source`.
    pub fn segments(&self, source: SegmentSource, count: u64) {
        self.segments.add(count, &[key_value(source)]);
    }
    /// Tokens handled as `class`.
    pub fn tokens(&self, class: TokenClass, count: u64) {
        self.tokens.add(count, &[key_value(class)]);
    }
    /// An attempt was repeated after a failure.
    pub fn retry(&self, kind: AttemptKind) {
        self.retries.add(1, &[key_value(kind)]);
    }
    /// A second attempt was raced against a slow first.
    pub fn hedge(&self, kind: AttemptKind) {
        self.hedges.add(1, &[key_value(kind)]);
    }
    /// A request was moved after its combiner was lost.
    pub fn failover(&self) {
        self.failovers.add(1, &[]);
    }
    /// The combiner prefilled a segment itself because no worker could.
    pub fn last_resort_prefill(&self) {
        self.last_resort.add(1, &[]);
    }
    /// Bytes of state were received.
    pub fn transfer_bytes(&self, bytes: u64) {
        self.transfer_bytes.add(bytes, &[]);
    }
    /// A transfer failed.
    pub fn transfer_failure(&self, reason: TransferFailure) {
        self.transfer_failures.add(1, &[key_value(reason)]);
    }
    /// Share of a transfer's time hidden by other work; clamped to 0..=1, and dropped if not a number.
    pub fn transfer_hidden(&self, share: f64) {
        if share.is_nan() {
            return;
        }
        self.transfer_hidden.record(share.clamp(0.0, 1.0), &[]);
    }
    /// A request was turned away.
    pub fn rejection(&self, reason: Rejection) {
        self.rejections.add(1, &[key_value(reason)]);
    }
    /// A client went away.
    pub fn disconnect(&self, phase: DisconnectPhase) {
        self.disconnects.add(1, &[key_value(phase)]);
    }
    /// A hot entry has one more holder.
    pub fn replication(&self) {
        self.replications.add(1, &[]);
    }
    /// A segment is so long that it would be the makespan alone.
    pub fn makespan_bound_segment(&self) {
        self.makespan_bound.add(1, &[]);
    }
}
