//! Start and end of the exporters.
//!
//! Owns the providers, and a runtime of their own so that exports share no thread with requests. What can go wrong:
//! an exporter that never answers. Full queues then drop what is recorded, and shutdown leaves the exporter behind.

use crate::config::{LogFormat, TelemetryConfig};
use crate::metrics::{self, Metrics, SCOPE};
use axum::{Router, http::StatusCode, http::header::CONTENT_TYPE, response::IntoResponse, routing::get};
use opentelemetry::metrics::MeterProvider;
use opentelemetry::trace::TracerProvider;
use opentelemetry::{KeyValue, global};
use opentelemetry_otlp::{MetricExporter, SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::metrics::{PeriodicReader, SdkMeterProvider};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{Sampler, SdkTracerProvider};
use prometheus::{Registry, TextEncoder};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tracing::Subscriber;
use tracing_subscriber::{EnvFilter, Layer, layer::SubscriberExt, registry::LookupSpan, util::SubscriberInitExt};

static STARTED: AtomicBool = AtomicBool::new(false);

/// Why telemetry did not start.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// A second start.
    #[error("telemetry was started before in this process; start it once, in main")]
    AlreadyStarted,
    /// A setting of no use.
    #[error("telemetry setting `{field}`: {reason}")]
    Setting {
        /// The setting.
        field: &'static str,
        /// What is wrong, and what is right.
        reason: String,
    },
    /// An exporter could not be built.
    #[error("cannot build the {exporter} exporter: {reason}")]
    Exporter {
        /// The exporter.
        exporter: &'static str,
        /// What it said.
        reason: String,
    },
    /// No runtime for the exporters.
    #[error("cannot start the exporters' runtime: {0}")]
    Runtime(#[from] std::io::Error),
    /// Another subscriber is set.
    #[error("a log subscriber is already installed in this process: {0}")]
    Subscriber(#[from] tracing_subscriber::util::TryInitError),
}

/// The running exporters; end them with [`Telemetry::shutdown`].
#[derive(Debug)]
pub struct Telemetry {
    registry: Registry,
    meters: SdkMeterProvider,
    tracers: Option<SdkTracerProvider>,
    runtime: Option<Runtime>,
    shutdown_timeout: Duration,
}

impl Telemetry {
    /// Installs metrics, traces, propagation and logs for the process.
    ///
    /// # Errors
    /// A bad setting, an exporter that cannot be built, or a second start. A receiver that is down is no error.
    pub fn start(config: &TelemetryConfig) -> Result<Self, TelemetryError> {
        let filter = EnvFilter::try_new(&config.log_filter)
            .map_err(|e| TelemetryError::Setting { field: "log_filter", reason: format!("{e}; use e.g. `info`") })?;
        let telemetry = Self::build(config)?;
        if STARTED.swap(true, Ordering::SeqCst) {
            return Err(TelemetryError::AlreadyStarted);
        }
        let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
        let lines = match config.log_format {
            LogFormat::Text => lines.boxed(),
            LogFormat::Json => lines.json().boxed(),
        };
        tracing_subscriber::registry().with(lines.with_filter(filter)).with(telemetry.trace_layer()).try_init()?;
        global::set_text_map_propagator(TraceContextPropagator::new());
        global::set_meter_provider(telemetry.meters.clone());
        if let Some(tracers) = &telemetry.tracers {
            global::set_tracer_provider(tracers.clone());
        }
        metrics::install(telemetry.metrics());
        Ok(telemetry)
    }

    pub(crate) fn build(config: &TelemetryConfig) -> Result<Self, TelemetryError> {
        if !(0.0..=1.0).contains(&config.trace_sampling) {
            let reason = format!("{} is not a share; use 0 to 1", config.trace_sampling);
            return Err(TelemetryError::Setting { field: "trace_sampling", reason });
        }
        if config.export_interval.is_zero() {
            let reason = "0 is no interval; use e.g. `15s`".to_string();
            return Err(TelemetryError::Setting { field: "export_interval", reason });
        }
        let instance = config.instance_id.iter().map(|id| KeyValue::new("service.instance.id", id.clone()));
        let resource =
            Resource::builder().with_service_name(config.service_name.clone()).with_attributes(instance).build();
        let registry = Registry::new();
        let prometheus = opentelemetry_prometheus::exporter()
            .with_registry(registry.clone())
            .build()
            .map_err(|e| TelemetryError::Exporter { exporter: "Prometheus", reason: e.to_string() })?;
        let mut meters = SdkMeterProvider::builder().with_resource(resource.clone()).with_reader(prometheus);
        let (mut tracers, mut runtime) = (None, None);
        if let Some(endpoint) = &config.otlp_endpoint {
            let own = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .thread_name("hypic-otlp")
                .enable_all()
                .build()?;
            // The exporters' connections live on the runtime that is entered here.
            let built = {
                let _entered = own.enter();
                exporters(endpoint, config.otlp_timeout)
            };
            let (spans, points) = match built {
                Ok(built) => built,
                Err(error) => {
                    own.shutdown_background();
                    return Err(error);
                }
            };
            meters = meters.with_reader(PeriodicReader::builder(points).with_interval(config.export_interval).build());
            let sampler = Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(config.trace_sampling)));
            let builder = SdkTracerProvider::builder().with_resource(resource).with_sampler(sampler);
            tracers = Some(builder.with_batch_exporter(spans).build());
            runtime = Some(own);
        }
        let shutdown_timeout = config.shutdown_timeout;
        Ok(Self { registry, meters: meters.build(), tracers, runtime, shutdown_timeout })
    }

    pub(crate) fn metrics(&self) -> Metrics {
        Metrics::new(&self.meters.meter(SCOPE))
    }

    pub(crate) fn trace_layer<S>(&self) -> Option<impl Layer<S> + use<S>>
    where
        S: Subscriber + for<'a> LookupSpan<'a>,
    {
        let tracers = self.tracers.as_ref()?;
        let layer = tracing_opentelemetry::layer().with_tracer(tracers.tracer(SCOPE));
        // The exporters' own transport must not be traced, or each export makes spans for the next.
        Some(layer.with_filter(EnvFilter::new("info,h2=off,hyper=off,tonic=off,tower=off,opentelemetry=off")))
    }

    /// Serves the metrics as Prometheus text at `/metrics`.
    pub fn prometheus_routes(&self) -> Router {
        let registry = self.registry.clone();
        Router::new().route(
            "/metrics",
            get(move || {
                let text = TextEncoder::new().encode_to_string(&registry.gather());
                async move {
                    match text {
                        Ok(text) => ([(CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response(),
                        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
                    }
                }
            }),
        )
    }

    /// Exports what is left, and returns within `shutdown_timeout` whatever the exporters do.
    /// Returns whether all was exported. Blocks the thread for that time at most.
    pub fn shutdown(mut self) -> bool {
        let deadline = Instant::now() + self.shutdown_timeout;
        let (done, ended) = mpsc::channel();
        let meters = self.meters.clone();
        let mut running = spawn(done.clone(), move || meters.shutdown().is_ok());
        if let Some(tracers) = self.tracers.clone() {
            running += spawn(done.clone(), move || tracers.shutdown().is_ok());
        }
        drop(done);
        let expected = 1 + usize::from(self.tracers.is_some());
        let mut exported = running == expected;
        for _ in 0..running {
            let left = deadline.saturating_duration_since(Instant::now());
            exported &= ended.recv_timeout(left).unwrap_or(false);
        }
        self.leave_behind();
        exported
    }

    /// Dropping a provider, or a runtime, waits for its exporter. A thread may wait for that, the caller may not.
    fn leave_behind(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
        let (meters, tracers) = (self.meters.clone(), self.tracers.take());
        self.meters = SdkMeterProvider::builder().build();
        let _ = std::thread::Builder::new().name("hypic-telemetry".into()).spawn(move || drop((meters, tracers)));
    }
}

impl Drop for Telemetry {
    fn drop(&mut self) {
        if self.runtime.is_some() {
            self.leave_behind();
        }
    }
}

/// Runs `work` on a thread that nobody joins, and sends its result. Number of threads started.
fn spawn(done: mpsc::Sender<bool>, work: impl FnOnce() -> bool + Send + 'static) -> usize {
    let thread = std::thread::Builder::new().name("hypic-telemetry-end".into());
    // Nobody may listen any more when the exporter gives up.
    usize::from(thread.spawn(move || _ = done.send(work())).is_ok())
}

fn exporters(endpoint: &str, timeout: Duration) -> Result<(SpanExporter, MetricExporter), TelemetryError> {
    let error = |e: opentelemetry_otlp::ExporterBuildError| TelemetryError::Exporter {
        exporter: "OTLP",
        reason: format!("{e}; `otlp_endpoint` must be like `http://collector:4317`"),
    };
    let spans = SpanExporter::builder().with_tonic().with_endpoint(endpoint).with_timeout(timeout);
    let points = MetricExporter::builder().with_tonic().with_endpoint(endpoint).with_timeout(timeout);
    Ok((spans.build().map_err(error)?, points.build().map_err(error)?))
}
