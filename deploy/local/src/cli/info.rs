//! `hypic model info`: what a model is and what it costs, from its configuration alone.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use bytesize::ByteSize;
use clap::Args;
use hypic_model::{Config, ModelInfo, families};
use hypic_state::DType;
use serde_json::{Value, json};

use crate::dtype::ComputeDType;
use crate::source::ModelSource;

/// Lengths of segments for which the size of an entry is told, in tokens.
const LENGTHS: [usize; 3] = [512, 2048, 8192];

/// Options of `hypic model info`.
#[derive(Debug, Args)]
pub(super) struct InfoArgs {
    /// Checkpoint directory, of which config.json is enough, or a configuration file alone [default: the demo model in
    /// the program]
    model: Option<PathBuf>,
    /// Dtype of K and V: auto is the one that config.json names
    #[arg(long, value_name = "auto|f32|bf16", default_value = "auto")]
    dtype: ComputeDType,
    /// Seam for which sizes of entries are told: leading tokens of a segment that are recomputed
    #[arg(long, allow_negative_numbers = true, value_name = "N", default_value_t = 8)]
    seam: u32,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: InfoArgs) -> Result<()> {
    let file = args.model.as_deref().filter(|path| path.is_file());
    let source = ModelSource::new(args.model.clone());
    let config = file.map_or_else(|| source.config(), parse)?;
    let spec = families::describe(&config)?;
    let dtype = args.dtype.asked().unwrap_or(if names_bf16(&config)? { DType::Bf16 } else { DType::F32 });
    let info = ModelInfo::of(&spec, dtype);
    let entry_bytes = |tokens: usize| info.entry_bytes(tokens, args.seam as usize);
    // The anchor needs the tokenizer, which a lone config.json lacks.
    let text = if file.is_some() { None } else { source.text()? };
    let anchor = text.as_ref().map(|t| -> Result<_> {
        let ids = t.turn_anchor().to_vec();
        let text = t.tokenizer().decode(&ids, true)?;
        Ok((ids, text))
    });
    let anchor = anchor.transpose()?;
    if args.json {
        let mut value = serde_json::to_value(&info)?;
        value["dtype"] = json!(dtype.to_string());
        value["seam"] = json!(args.seam);
        value["compose"] = json!(spec.compose.to_string());
        value["entry_bytes"] = LENGTHS.iter().map(|&n| (n.to_string(), json!(entry_bytes(n)))).collect();
        value["turn_anchor"] = anchor.map_or(Value::Null, |(ids, text)| json!({"token_ids": ids, "text": text}));
        value["not_served"] = json!(spec.ignored);
        writeln!(std::io::stdout(), "{value}")?;
        return Ok(());
    }
    let size = |bytes: usize| ByteSize(bytes as u64).display().iec().to_string();
    let mut table = String::new();
    let mut row = |name: &str, value: String| {
        table.push_str(format!("{name:<22} {value}").trim_end());
        table.push('\n');
    };
    row("model", source.name());
    row("family", info.family.clone());
    row("layers", layers(&info));
    row("parameters", format!("{:.2} million", info.parameters as f64 / 1e6));
    let limit = |n: usize| format!(" (rope scaling is dynamic: beyond {n} a prompt is served by mode full alone)");
    row("positions", format!("{}{}", info.max_positions, info.reusable_positions.map_or_else(String::new, limit)));
    row("compose rule", format!("{} (T is {})", spec.compose, info.transition));
    row(
        "state of a sequence",
        format!("{} + {} per token ({dtype})", size(info.sequence_bytes), size(info.kv_bytes_per_token)),
    );
    let (fixed, operators) = (size(info.entry_recurrent_bytes), size(info.entry_operator_bytes));
    row("entry", format!("at most {fixed} (T {operators}) + {} per token of the body", size(info.kv_bytes_per_token)));
    for n in LENGTHS {
        row("", format!("{n:>6} tokens, seam {}: {}", args.seam, size(entry_bytes(n))));
    }
    match anchor {
        Some((ids, text)) if !ids.is_empty() => row("anchor turn", format!("{text:?} {ids:?}")),
        Some(_) => row("anchor turn", "none".to_string()),
        None => row("anchor turn", "unknown: no tokenizer.json here".to_string()),
    }
    row("not served, if there", not_served(&spec.ignored));
    std::io::stdout().write_all(table.as_bytes())?;
    Ok(())
}

/// The configuration in a file of its own.
fn parse(path: &Path) -> Result<Config> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(Config::parse_file(&path.file_name().unwrap_or_default().to_string_lossy(), &bytes)?)
}

/// How many layers there are of each kind.
fn layers(info: &ModelInfo) -> String {
    let mut text = format!("{}: {} linear, {} full attention", info.layers, info.linear_layers, info.attention_layers);
    match info.latent_layers {
        0 => {}
        all if all == info.attention_layers => text.push_str(" over a latent (MLA)"),
        some => text.push_str(&format!(", {some} of those over a latent (MLA)")),
    }
    if info.expert_layers > 0 {
        text.push_str(&format!("; {} with experts", info.expert_layers));
    }
    text
}

/// Prefixes of tensors that are known and not served; the first ones, where each layer has some.
fn not_served(prefixes: &[String]) -> String {
    const MOST: usize = 6;
    if prefixes.is_empty() {
        return "nothing".to_string();
    }
    let shown: Vec<String> = prefixes.iter().take(MOST).map(|prefix| format!("{prefix}*")).collect();
    let more = prefixes.len() - shown.len();
    let rest = if more > 0 { format!(" and {more} more (--json tells all)") } else { String::new() };
    format!("{}{rest}", shown.join(", "))
}

fn names_bf16(config: &Config) -> Result<bool> {
    for place in [config.text()?, config.clone()] {
        for key in ["dtype", "torch_dtype"] {
            if let Some(name) = place.opt_str(key)? {
                return Ok(name == "bfloat16");
            }
        }
    }
    Ok(false)
}
