//! The reference of metrics and spans.
//!
//! Owns the text of `deploy/metrics.md`. What can go wrong: the file is older than the constants; a test says so.

use crate::labels::LABEL_SETS;
use crate::names::{METRICS, SPANS};
use std::fmt::Write;

/// All metrics, label values and spans as markdown tables.
pub fn document() -> String {
    let mut text = String::from("# Metrics and spans\n\nGenerated from the constants of `hypic-telemetry`.\n\n");
    text.push_str(
        "Prometheus writes a dot as `_`, and appends the unit, and `_total` for a counter.\n\n## Metrics\n\n",
    );
    text.push_str("| Name | Kind | Unit | Labels | What |\n|---|---|---|---|---|\n");
    for one in METRICS {
        let (kind, keys) = (one.kind.as_str(), keys(one.labels));
        // Writing to a string cannot fail.
        let _ = writeln!(text, "| `{}` | {kind} | `{}` | {keys} | {} |", one.name, one.unit, one.description);
    }
    text.push_str(
        "\n## Label values\n\nA key in more than one row has the values of the row that fits its metric.\n\n",
    );
    text.push_str("| Label | Values |\n|---|---|\n");
    for (key, values) in LABEL_SETS {
        let _ = writeln!(text, "| `{key}` | {} |", keys(values));
    }
    text.push_str("\n## Spans\n\n| Name | Attributes | What |\n|---|---|---|\n");
    for one in SPANS {
        let _ = writeln!(text, "| `{}` | {} | {} |", one.name, keys(one.attributes), one.description);
    }
    text
}

fn keys(keys: &[&str]) -> String {
    keys.iter().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ")
}
