//! What is exported where.
//!
//! Owns the settings. What can go wrong: an unknown field or a malformed duration, refused when read.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Form of the log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Settings of [`crate::Telemetry`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TelemetryConfig {
    /// Address of an OTLP receiver (gRPC), such as `http://collector:4317`; none: no OTLP.
    pub otlp_endpoint: Option<String>,
    /// Limit of one export.
    #[serde(with = "humantime_serde")]
    pub otlp_timeout: Duration,
    /// Time between two exports of metrics.
    #[serde(with = "humantime_serde")]
    pub export_interval: Duration,
    /// Limit of the last export at shutdown.
    #[serde(with = "humantime_serde")]
    pub shutdown_timeout: Duration,
    /// Form of the log lines.
    pub log_format: LogFormat,
    /// Filter of the log lines, as `info,hypic_router=debug`.
    pub log_filter: String,
    /// `service.name` of what is exported.
    pub service_name: String,
    /// `service.instance.id` of what is exported; none: not set.
    pub instance_id: Option<String>,
    /// Share of traces kept, 0 to 1, where no inbound context has decided.
    pub trace_sampling: f64,
}

impl Default for TelemetryConfig {
    fn default() -> Self {
        Self {
            otlp_endpoint: None,
            otlp_timeout: Duration::from_secs(5),
            export_interval: Duration::from_secs(15),
            shutdown_timeout: Duration::from_secs(2),
            log_format: LogFormat::Text,
            log_filter: "info,opentelemetry=warn,opentelemetry_sdk=warn".into(),
            service_name: "hypic".into(),
            instance_id: None,
            trace_sampling: 1.0,
        }
    }
}
