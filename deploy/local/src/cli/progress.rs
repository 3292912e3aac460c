//! Progress on a terminal; silent elsewhere.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

const TICK: Duration = Duration::from_millis(100);

/// The loading of a model.
pub(super) struct Loading(ProgressBar);

impl Loading {
    pub fn new(name: &str, tensors: usize) -> Self {
        let bar = ProgressBar::new(tensors as u64);
        bar.set_style(style("loading {prefix} {bar:30} {pos}/{len} {msg}"));
        bar.set_prefix(name.to_string());
        Loading(bar)
    }

    pub fn read(&self, tensor: &str) {
        self.0.inc(1);
        self.0.set_message(tensor.to_string());
    }

    pub fn done(&self) {
        self.0.finish_and_clear();
    }
}

/// The prefill of a prompt.
pub(super) struct Prefilling(ProgressBar);

impl Prefilling {
    pub fn new() -> Self {
        let bar = ProgressBar::new(0);
        bar.set_style(style("prefill {bar:30} {pos}/{len} tokens {elapsed}"));
        bar.enable_steady_tick(TICK);
        Prefilling(bar)
    }

    pub fn at(&self, done: u64, total: u64) {
        self.0.set_length(total);
        self.0.set_position(done);
    }

    pub fn done(&self) {
        self.0.finish_and_clear();
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the template is valid")
}
