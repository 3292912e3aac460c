//! Progress on a terminal; silent elsewhere.

use std::fmt::Write;
use std::time::Duration;

use hypic_router::Progress;
use indicatif::{ProgressBar, ProgressState, ProgressStyle};

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
    /// Show `progress` until dropped.
    pub fn new(progress: Progress) -> Self {
        let bar = ProgressBar::new_spinner();
        let tokens = move |_: &ProgressState, out: &mut dyn Write| _ = write!(out, "{}", progress.tokens());
        bar.set_style(style("{spinner} prefill: {tokens} tokens, {elapsed}").with_key("tokens", tokens));
        bar.enable_steady_tick(TICK);
        Prefilling(bar)
    }
}

impl Drop for Prefilling {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the template is valid")
}
