//! `hypic generate`: one prompt, answered in this process.

use std::io::{IsTerminal, Write};

use anyhow::{Context, Result};
use clap::Args;
use hypic_router::{Engine, Event, Mode, PromptOptions, Report, Request, Sampling, TokenLogprobs, validate};
use hypic_state::ComposeRule;
use serde_json::{Value, json};

use super::ModelArgs;
use super::progress::Prefilling;
use super::prompt::PromptArgs;

/// Options of `hypic generate`.
#[derive(Debug, Args)]
pub(super) struct GenerateArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    prompt: PromptArgs,
    /// How cached work is used: full (never), prefix (exact prefixes only), hypic (segments at any position)
    #[arg(long, value_name = "full|prefix|hypic", default_value = "hypic")]
    mode: Mode,
    /// How a cached segment changes the recurrent state [default: the model's]
    #[arg(long, value_name = "transition|last|add")]
    compose: Option<ComposeRule>,
    /// Tokens to generate at most
    #[arg(long, allow_negative_numbers = true, value_name = "N", default_value_t = 128)]
    max_tokens: u32,
    /// 0 is greedy [default: the model's]
    #[arg(long, allow_negative_numbers = true, value_name = "T")]
    temperature: Option<f32>,
    /// Keep the k most likely tokens [default: the model's]
    #[arg(long, allow_negative_numbers = true, value_name = "K")]
    top_k: Option<u32>,
    /// Keep the most likely tokens up to this mass [default: the model's]
    #[arg(long, allow_negative_numbers = true, value_name = "P")]
    top_p: Option<f32>,
    /// Same seed, same answer [default: drawn at random]
    #[arg(long, allow_negative_numbers = true, value_name = "N")]
    seed: Option<u64>,
    /// End the answer before this text [repeatable]
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// With --token-segments: end at the model's end tokens, as text prompts do
    #[arg(long, requires = "token_segments")]
    stop_at_eos: bool,
    /// Report the K most likely tokens for each generated one
    #[arg(long, allow_negative_numbers = true, value_name = "K")]
    logprobs: Option<u32>,
    /// Ask N times in this process: from the second time on the cache is warm
    #[arg(long, allow_negative_numbers = true, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// Read the template's added tokens in the given texts as such
    #[arg(long)]
    special_tokens: bool,
    /// Print one JSON object per answer
    #[arg(long)]
    json: bool,
}

/// One complete answer.
#[derive(Default)]
struct Complete {
    text: Option<String>,
    token_ids: Vec<u32>,
    logprobs: Vec<TokenLogprobs>,
    finish_reason: &'static str,
    report: Report,
}

pub(super) fn run(args: GenerateArgs) -> Result<()> {
    let tokens = args.prompt.is_tokens();
    let request = Request {
        prompt: args.prompt.prompt()?,
        options: PromptOptions {
            mode: Some(args.mode),
            compose: args.compose,
            separator: args.prompt.separator.clone(),
            special_tokens: args.special_tokens,
            ..PromptOptions::default()
        },
        sampling: Sampling {
            temperature: args.temperature,
            top_k: args.top_k,
            top_p: args.top_p,
            seed: args.seed,
            ..Sampling::default()
        },
        n: 1,
        max_tokens: Some(args.max_tokens),
        stop: args.stop,
        stop_at_eos: !tokens || args.stop_at_eos,
        logprobs: args.logprobs,
        deadline: None,
        tenant: None,
    };
    validate(&request)?;
    if !tokens {
        args.model.check_tokenizer()?;
    }
    let local = args.model.start(!tokens)?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().context("cannot start the runtime")?;
    for round in 0..args.repeat {
        let live = !args.json;
        let answer = runtime.block_on(answer(local.router().as_ref(), request.clone(), live))?;
        if args.json {
            writeln!(std::io::stdout(), "{}", to_json(&answer))?;
        } else {
            print_table(&answer, round, args.repeat)?;
        }
    }
    Ok(())
}

/// Get one answer; when `live`, its text appears as it comes.
async fn answer(engine: &impl Engine, request: Request, live: bool) -> Result<Complete> {
    let mut answer = engine.generate(request).await?;
    let mut progress = Some(Prefilling::new(answer.progress.clone()));
    let mut complete = Complete::default();
    while let Some(event) = answer.events.recv().await {
        match event {
            Event::Delta(delta) => {
                drop(progress.take());
                if let Some(text) = &delta.text {
                    complete.text.get_or_insert_default().push_str(text);
                    if live {
                        let mut stdout = std::io::stdout();
                        write!(stdout, "{text}")?;
                        stdout.flush()?;
                    }
                }
                complete.token_ids.extend(delta.token_ids);
                complete.logprobs.extend(delta.logprobs);
            }
            Event::Finished { reason, .. } => complete.finish_reason = reason.as_str(),
            Event::Report(report) => {
                complete.report = report;
                return Ok(complete);
            }
            Event::Failed(error) => return Err(error.into()),
        }
    }
    anyhow::bail!("the answer ended without a report")
}

fn to_json(answer: &Complete) -> Value {
    let logprobs = |l: &TokenLogprobs| -> Vec<Value> {
        l.top.iter().map(|t| json!({"token_id": t.token_id, "logprob": t.logprob})).collect()
    };
    let Report { usage, segments, timings_ms } = &answer.report;
    json!({
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "logprobs": answer.logprobs.iter().map(logprobs).collect::<Vec<_>>(),
        "usage": usage,
        "segments": segments,
        "timings_ms": timings_ms,
    })
}

/// What the answer cost, on standard error where text and table would mix in a pipe.
fn print_table(answer: &Complete, round: u32, rounds: u32) -> Result<()> {
    let mut stdout = std::io::stdout();
    match answer.text {
        Some(_) => writeln!(stdout)?,
        None => writeln!(stdout, "{:?}", answer.token_ids)?,
    }
    let Report { usage, segments, timings_ms: t } = &answer.report;
    let mut lines = vec![String::new()];
    if rounds > 1 {
        lines.push(format!("round {} of {rounds}", round + 1));
    }
    lines.push(format!("{:>9} {:>7} {:>7}  {:<9} worker", "segment", "tokens", "reused", "source"));
    for (i, s) in segments.iter().enumerate() {
        let worker = s.worker.as_deref().unwrap_or("-");
        lines.push(format!("{i:>9} {:>7} {:>7}  {:<9} {worker}", s.tokens, s.reused, s.source.as_str()));
    }
    lines.push(format!(
        "prompt {} tokens = {} exact + {} composed + {} seam + {} computed; {} generated ({})",
        usage.prompt_tokens,
        usage.exact_tokens,
        usage.composed_tokens,
        usage.seam_tokens,
        usage.computed_tokens,
        usage.completion_tokens,
        answer.finish_reason
    ));
    lines.push(format!(
        "first token {:.1} ms (queue {:.1}, prefill {:.1}, compose {:.1}), total {:.1} ms",
        t.first_token, t.queue, t.prefill, t.compose, t.total
    ));
    let table = lines.join("\n");
    if stdout.is_terminal() {
        writeln!(stdout, "{table}")?;
    } else {
        eprintln!("{table}");
    }
    Ok(())
}
