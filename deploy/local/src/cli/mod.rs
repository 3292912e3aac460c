//! The command line.

mod generate;
mod info;
mod progress;
mod prompt;
mod role;
mod serve;
mod up;

use std::io::{ErrorKind, IsTerminal};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::{Args, Parser, Subcommand};
pub use hypic_cluster::Role;
use hypic_router::Anchor;
use tracing_subscriber::EnvFilter;

use crate::assembly::{Local, LocalConfig};
use crate::dtype::ComputeDType;
use crate::source::ModelSource;
pub(crate) use serve::on_signal;

/// Serves hybrid-attention language models with position-independent caching: every document of a prompt is
/// prefilled once and reused at any place of any later prompt.
#[derive(Debug, Parser)]
#[command(name = "hypic", version, max_term_width = 120)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve OpenAI's HTTP API and hypic's gRPC API from this machine
    Serve(serve::ServeArgs),
    /// Answer one prompt in this process
    Generate(generate::GenerateArgs),
    /// Be the router of a cluster
    Router(role::RoleArgs),
    /// Be a scatter worker of a cluster
    ScatterWorker(role::RoleArgs),
    /// Be a combiner of a cluster
    Combiner(role::RoleArgs),
    /// Start a whole cluster as processes on this machine
    Up(up::UpArgs),
    /// Be another program that ends with its parent
    #[command(hide = true)]
    WithParent(up::WithParentArgs),
    /// Look into models
    #[command(subcommand)]
    Model(ModelCommand),
}

#[derive(Debug, Subcommand)]
enum ModelCommand {
    /// Tell a model's family, layers, sizes, and what of it is not served
    Info(info::InfoArgs),
}

/// Most scatter workers in one process: each has threads of its own.
const MAX_WORKERS: i64 = 256;

/// What both `serve` and `generate` load.
#[derive(Debug, Args)]
struct ModelArgs {
    /// Hugging Face checkpoint directory (config.json, safetensors, tokenizer.json) [default: the demo model in the program]
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Compute dtype: auto is the checkpoint's where the CPU has instructions for it, else f32
    #[arg(long, value_name = "auto|f32|bf16", default_value = "auto")]
    dtype: ComputeDType,
    /// Scatter workers, which share the cores [default: the number of cores, at most 4]
    #[arg(long, allow_negative_numbers = true, value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=MAX_WORKERS))]
    workers: Option<u16>,
    /// Memory for cached entries and prefix states
    #[arg(long, allow_negative_numbers = true, value_name = "SIZE", default_value = "1GiB")]
    cache_bytes: bytesize::ByteSize,
    /// Seam: leading tokens of each segment that are recomputed behind the true prefix
    #[arg(long, allow_negative_numbers = true, value_name = "N", default_value_t = 8)]
    seam: u32,
    /// What stands before a segment in its isolated prefill: the template's opening of a user turn, the rendered
    /// system message, or nothing
    #[arg(long, value_name = "none|turn|system", default_value = "turn")]
    anchor: Anchor,
}

impl ModelArgs {
    /// Refuse a model directory without a tokenizer before its weights are loaded.
    fn check_tokenizer(&self) -> Result<()> {
        let Some(dir) = self.model.as_ref().filter(|dir| dir.is_dir() && !dir.join("tokenizer.json").exists()) else {
            return Ok(());
        };
        bail!(
            "{} has no tokenizer.json, which text needs: add it, or give token ids by --token-segments",
            dir.display()
        )
    }

    /// Load the model and start all roles; without `with_text` the tokenizer is left alone.
    fn start(&self, with_text: bool) -> Result<Local> {
        let source = ModelSource::new(self.model.clone());
        let mut config = LocalConfig::named(source.name());
        config.dtype = self.dtype;
        config.workers = self.workers.map_or(config.workers, usize::from);
        config.cache_bytes = usize::try_from(self.cache_bytes.as_u64())?;
        config.router.seam = self.seam as usize;
        config.router.anchor = self.anchor;
        let text = if with_text { source.text()? } else { None };
        let checkpoint = source.checkpoint()?;
        let progress = progress::Loading::new(&source.name(), checkpoint.tensor_count());
        let local = Local::start(config, &checkpoint, text, &|tensor| progress.read(tensor))?;
        progress.done();
        Ok(local)
    }
}

/// A program that is one role.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 120)]
struct RoleCli {
    #[command(flatten)]
    args: role::RoleArgs,
}

/// Be the program of one role, as its arguments say.
pub fn role_program(role: Role) -> ExitCode {
    exit(role::run(role, RoleCli::parse().args))
}

/// Be the program `hypic`, as its arguments say.
pub fn program() -> ExitCode {
    exit(run(Cli::parse()))
}

fn exit(result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever read the output has seen enough.
        Err(error) if error.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe) => {
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Run the program.
///
/// # Errors
/// With a message that names what is wrong and how to mend it.
pub fn run(cli: Cli) -> Result<()> {
    let (level, work): (&str, Box<dyn FnOnce() -> Result<()>>) = match cli.command {
        // Roles set up their own logs.
        Command::Router(args) => return role::run(Role::Router, args),
        Command::ScatterWorker(args) => return role::run(Role::ScatterWorker, args),
        Command::Combiner(args) => return role::run(Role::Combiner, args),
        Command::WithParent(args) => return up::with_parent(args),
        Command::Up(args) => ("info", Box::new(move || up::run(args))),
        Command::Serve(args) => ("info", Box::new(move || serve::run(args))),
        Command::Generate(args) => ("warn", Box::new(move || generate::run(args))),
        Command::Model(ModelCommand::Info(args)) => ("warn", Box::new(move || info::run(args))),
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let ansi = std::io::stderr().is_terminal();
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(ansi).with_writer(std::io::stderr).init();
    work()
}
