//! What `up` tells on standard output: a line for each event, written out at once.

use std::io::Write;

use anyhow::{Context, Result};
use serde_json::{Value, json};

/// Writes events.
pub(super) struct Teller {
    json: bool,
}

impl Teller {
    pub fn new(json: bool) -> Self {
        Teller { json }
    }

    /// A process takes work; `hello` is its own line.
    pub fn started(&mut self, hello: &Value) -> Result<()> {
        if self.json {
            return line(&hello.to_string());
        }
        let text = |key: &str| hello[key].as_str().unwrap_or("-").to_string();
        line(&format!(
            "{:<15} {}  pid {}  {}  metrics http://{}/metrics",
            text("role"),
            text("id"),
            hello["pid"],
            text(if hello["http"].is_null() { "address" } else { "http" }),
            text("metrics"),
        ))
    }

    /// Every router can use every member.
    pub fn ready(&mut self, address: &str) -> Result<()> {
        let url = format!("http://{address}");
        line(&if self.json { json!({ "ready": url }).to_string() } else { format!("ready           {url}") })
    }

    /// A process has ended. `status` is its exit code, or minus the number of the signal that ended it.
    pub fn exited(&mut self, role: &str, id: Option<&str>, pid: u32, status: i32) -> Result<()> {
        if self.json {
            let event = json!({ "event": "exited", "role": role, "id": id, "pid": pid, "status": status });
            return line(&event.to_string());
        }
        line(&format!("{role:<15} {}  pid {pid}  has ended with status {status}", id.unwrap_or("-")))
    }
}

fn line(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}").and_then(|()| out.flush()).context("cannot write to standard output")
}
