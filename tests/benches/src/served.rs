//! A model behind the router, with all roles: what a client sees.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use hypic::assembly::{Local, LocalConfig};
use hypic_router::{Engine, Event, Mode, Prompt, PromptOptions, Report, Request, Sampling};
use tokio::runtime::Runtime;

use crate::Subject;

/// Tokens of the anchor: as many as a chat template has before a user's content.
const ANCHOR: usize = 3;

/// All roles, running.
pub struct Served {
    local: Local,
    runtime: Runtime,
}

/// One request.
#[derive(Clone, Debug)]
pub struct Asked {
    /// Segments and query.
    pub prompt: Prompt,
    /// How it is prefilled.
    pub mode: Mode,
    /// Requests of another name share no cached work.
    pub salt: String,
    /// Tokens to generate.
    pub tokens: u32,
    /// Answers.
    pub answers: u32,
}

impl Served {
    /// Start the roles.
    ///
    /// # Errors
    /// If the model cannot be loaded or the roles not be started.
    pub fn start(subject: &Subject, workers: usize, threads: usize) -> Result<Self> {
        let dtype = subject.dtype.to_string().parse()?;
        let config = LocalConfig { dtype, workers, threads, ..LocalConfig::named(subject.name) };
        let local = Local::start(config, &subject.checkpoint, None, &|_| {})?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .context("cannot start the runtime")?;
        Ok(Served { local, runtime })
    }

    /// Name of the kernels.
    pub fn kernels(&self) -> &str {
        self.local.kernel_set()
    }

    /// Ids of the vocabulary.
    pub fn vocab(&self) -> usize {
        self.local.model().spec().vocab
    }

    /// Ask, and wait for the end: the time to the first token as the client sees it, and the report.
    ///
    /// # Errors
    /// If the request fails.
    pub fn ask(&self, asked: &Asked) -> Result<(Duration, Report)> {
        let request = Request {
            prompt: asked.prompt.clone(),
            options: PromptOptions {
                mode: Some(asked.mode),
                salt: Some(asked.salt.clone()),
                ..PromptOptions::default()
            },
            sampling: Sampling { temperature: Some(0.0), ..Sampling::default() },
            n: asked.answers,
            max_tokens: Some(asked.tokens),
            stop: Vec::new(),
            stop_at_eos: false,
            logprobs: None,
            deadline: None,
            tenant: None,
        };
        let begun = Instant::now();
        self.runtime.block_on(async {
            let mut answer = self.local.router().generate(request).await?;
            let mut first = None;
            while let Some(event) = answer.events.recv().await {
                match event {
                    Event::Delta(_) => _ = first.get_or_insert_with(|| begun.elapsed()),
                    Event::Report(report) => return Ok((first.context("an answer without tokens")?, report)),
                    Event::Failed(e) => return Err(e.into()),
                    _ => {}
                }
            }
            bail!("the answer ended without a report")
        })
    }
}

/// Draws prompts.
pub struct Prompts {
    bits: u64,
    vocab: usize,
    anchor: Vec<u32>,
}

impl Prompts {
    /// Prompts of ids below `vocab`.
    pub fn new(vocab: usize) -> Self {
        let mut prompts = Prompts { bits: 1, vocab, anchor: Vec::new() };
        prompts.anchor = prompts.ids(ANCHOR);
        prompts
    }

    /// `n` ids.
    pub fn ids(&mut self, n: usize) -> Vec<u32> {
        let mut id = || {
            // xorshift64 (Marsaglia, 2003).
            self.bits ^= self.bits << 13;
            self.bits ^= self.bits >> 7;
            self.bits ^= self.bits << 17;
            ((self.bits >> 33) % self.vocab as u64) as u32
        };
        (0..n).map(|_| id()).collect()
    }

    /// `n` segments of `tokens` ids each.
    pub fn segments(&mut self, n: usize, tokens: usize) -> Vec<Vec<u32>> {
        (0..n).map(|_| self.ids(tokens)).collect()
    }

    /// The anchor that all prompts have.
    pub fn anchor(&self) -> &[u32] {
        &self.anchor
    }

    /// A prompt: a system text, documents, a query.
    pub fn prompt(&self, system: &[u32], documents: &[Vec<u32>], query: &[u32]) -> Prompt {
        let segments = std::iter::once(system.to_vec()).chain(documents.iter().cloned());
        Prompt::Tokens { segments: segments.collect(), query: query.to_vec(), anchor: Some(self.anchor.clone()) }
    }
}
