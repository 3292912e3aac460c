//! `FAMILIES.md` is what the descriptions say.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;

use hypic_model::{Config, ModelInfo, ModelSpec, families};
use hypic_state::DType;
use serde_json::{Value, json};

use crate::support::golden;

/// Lengths of segments, in tokens, and the seam for which the sizes are told.
const LENGTHS: [usize; 3] = [512, 2048, 8192];
const SEAM: usize = 8;

struct Family {
    name: &'static str,
    /// Fixtures whose `architectures` it serves; the description of each is of this family.
    fixtures: &'static [&'static str],
    /// Architectures of no fixture.
    more: &'static [&'static str],
    /// Configurations of released models.
    production: &'static [&'static str],
    mixers: &'static str,
    /// Why its default rule is the default.
    why: &'static str,
}

const FORGETS: &str = "T tells what a body's tokens make the layer forget and overwrite; it is exact in the first layer and \
                       close to exact in the others, whose inputs the isolated prefill only approximates";
const DECAYS: &str = "T is a decay per head that depends on the body's length alone, so it is exact in every layer";
const DEEP: &str = "in deep layers the decays of Mamba2 follow hidden states that the isolated prefill does not see, and \
                    products of such operators are worse than keeping the last body's state";

const FAMILIES: [Family; 13] = [
    Family {
        name: "qwen3_5",
        fixtures: &["qwen3_5", "qwen3_5_vlm"],
        more: &[],
        production: &[],
        mixers: "gated delta net, gated attention",
        why: FORGETS,
    },
    Family {
        name: "qwen3_5_moe",
        fixtures: &["qwen3_5_moe", "qwen3_5_moe_vlm"],
        more: &[],
        production: &["Qwen3.5-35B-A3B", "Qwen3.5-122B-A10B"],
        mixers: "gated delta net, gated attention",
        why: FORGETS,
    },
    Family {
        name: "qwen3_next",
        fixtures: &["qwen3_next"],
        more: &[],
        production: &["Qwen3-Next-80B-A3B"],
        mixers: "gated delta net, gated attention",
        why: FORGETS,
    },
    Family {
        name: "bailing_moe_linear",
        fixtures: &["bailing_moe_linear"],
        more: &[],
        production: &["Ring-mini-linear-2.0"],
        mixers: "lightning attention with rotary keys, attention",
        why: DECAYS,
    },
    Family {
        name: "bailing_moe_v2_5",
        fixtures: &["bailing_moe_v2_5"],
        more: &[],
        production: &[],
        mixers: "lightning attention with rotary keys, MLA",
        why: DECAYS,
    },
    Family {
        name: "bailing_hybrid",
        fixtures: &["bailing_hybrid"],
        more: &["BailingHybridForCausalLM"],
        production: &["Ling-3.0-flash"],
        mixers: "Kimi delta attention with a bounded gate, gated MLA",
        why: FORGETS,
    },
    Family {
        name: "kimi_linear",
        fixtures: &["kimi_linear"],
        more: &[],
        production: &["Kimi-Linear-48B-A3B"],
        mixers: "Kimi delta attention, MLA without rotation",
        why: FORGETS,
    },
    Family {
        name: "minimax",
        fixtures: &["minimax"],
        more: &[],
        production: &[],
        mixers: "lightning attention, attention",
        why: DECAYS,
    },
    Family {
        name: "minimax_m1",
        fixtures: &["minimax_m1"],
        more: &["MiniMaxText01ForCausalLM"],
        production: &["MiniMax-M1"],
        mixers: "lightning attention, attention",
        why: DECAYS,
    },
    Family {
        name: "olmo_hybrid",
        fixtures: &["olmo_hybrid"],
        more: &[],
        production: &[],
        mixers: "gated delta net with negative eigenvalues, attention",
        why: FORGETS,
    },
    Family {
        name: "granitemoehybrid",
        fixtures: &["granitemoehybrid"],
        more: &[],
        production: &[],
        mixers: "Mamba2, attention",
        why: DEEP,
    },
    Family {
        name: "nemotron_h",
        fixtures: &["nemotron_h", "nemotron_h_moe", "nemotron_h_latent_moe"],
        more: &[],
        production: &[],
        mixers: "Mamba2, attention without rotation; MLPs and experts without a gate",
        why: DEEP,
    },
    Family { name: "bamba", fixtures: &["bamba"], more: &[], production: &[], mixers: "Mamba2, attention", why: DEEP },
];

fn read(path: &Path) -> (Config, Value) {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    (Config::parse_file("config.json", &bytes).unwrap(), serde_json::from_slice(&bytes).unwrap())
}

fn describe(path: &Path) -> (ModelSpec, Vec<String>) {
    let (config, json) = read(path);
    let names = json["architectures"].as_array().unwrap().iter().map(|name| name.as_str().unwrap().to_string());
    (families::describe(&config).unwrap_or_else(|e| panic!("{}: {e}", path.display())), names.collect())
}

fn size(bytes: usize) -> String {
    match bytes {
        0..0x10_0000 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        _ => format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
    }
}

fn document() -> String {
    let mut text = String::from(
        "# Families\n\n\
         Generated from the descriptions in `src/families`; the sizes are those that `hypic model info CONFIG --dtype bf16` \
         tells.\n\n\
         T is the transition operator of a body, per head of a linear layer: a number (scalar), a number per key channel \
         (diagonal) or a matrix (dense). The default rule is what a jump does unless a request names another, or \
         `config.json` does with `\"hypic\": {\"compose\": \"last\"}`.\n\n\
         | Family | Architectures | Layers | T | Default rule |\n|---|---|---|---|---|\n",
    );
    let mut reasons: Vec<(&str, String, Vec<&str>)> = Vec::new();
    for family in &FAMILIES {
        let mut architectures = BTreeSet::from_iter(family.more.iter().map(|name| name.to_string()));
        let mut told = BTreeSet::new();
        for fixture in family.fixtures {
            let (spec, names) = describe(&golden(fixture).join("config.json"));
            assert_eq!(spec.family, family.name, "{fixture}");
            architectures.extend(names);
            told.insert((ModelInfo::of(&spec, DType::Bf16).transition, spec.compose.to_string()));
        }
        let architectures: Vec<String> = architectures.iter().map(|name| format!("`{name}`")).collect();
        assert_eq!(told.len(), 1, "{}: one kind of T and one rule", family.name);
        let (transition, rule) = told.pop_first().unwrap();
        let (name, mixers) = (family.name, family.mixers);
        writeln!(text, "| `{name}` | {} | {mixers} | {transition} | `{rule}` |", architectures.join(", ")).unwrap();
        match reasons.iter_mut().find(|(why, known, _)| *why == family.why && *known == rule) {
            Some((.., names)) => names.push(name),
            None => reasons.push((family.why, rule, vec![name])),
        }
    }
    text.push_str("\nWhy:\n\n");
    for (why, rule, names) in reasons {
        let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
        writeln!(text, "- `{rule}` for {}: {why}.", names.join(", ")).unwrap();
    }
    write!(
        text,
        "\n## Sizes of released models\n\n\
         Of those whose whole configuration is in `tests/golden/production_configs`, with K and V (or latents) in bf16, states and operators in f32, and a seam of {SEAM}. An entry is at most as large \
         as told: dense operators of heads that have forgotten everything are left out, which after some hundred tokens are \
         most of them.\n\n\
         | Model | Family | Linear + full layers | State of a sequence | T of an entry | \
         Entry of 512 tokens | 2048 tokens | 8192 tokens |\n|---|---|---|---|---|---|---|---|\n"
    )
    .unwrap();
    for family in &FAMILIES {
        for model in family.production {
            let (spec, _) = describe(&golden("production_configs").join(format!("{model}.json")));
            assert_eq!(spec.family, family.name, "{model}");
            let info = ModelInfo::of(&spec, DType::Bf16);
            let entries = LENGTHS.map(|tokens| size(info.entry_bytes(tokens, SEAM))).join(" | ");
            let (state, operators) = (size(info.sequence_bytes), size(info.entry_operator_bytes));
            let layers = format!("{} + {}", info.linear_layers, info.attention_layers);
            let name = family.name;
            writeln!(text, "| {model} | `{name}` | {layers} | {state} | {operators} | {entries} |").unwrap();
        }
    }
    text
}

#[test]
fn the_table_of_families_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("FAMILIES.md");
    if std::env::var_os("HYPIC_UPDATE_DOCS").is_some() {
        std::fs::write(&path, document()).unwrap();
    }
    let stored = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        stored == document(),
        "common/model/FAMILIES.md is out of date; run `HYPIC_UPDATE_DOCS=1 cargo test -p hypic-model the_table_of_families`"
    );
}

/// Every architecture that is served is in the table, and the other way round.
#[test]
fn the_table_of_families_is_whole() {
    let config = Config::parse(r#"{"architectures": ["Unheard"]}"#).unwrap();
    let error = families::describe(&config).unwrap_err().to_string();
    let (_, served) = error.split_once("served are ").expect("a list of what is served");
    let text = document();
    for name in served.trim_end_matches(')').split(", ") {
        assert!(text.contains(&format!("`{name}`")), "{name} is in no row");
    }
    // Architectures without a fixture must be taken for the family whose row has them.
    for family in &FAMILIES {
        for name in family.more {
            let (_, mut json) = read(&golden(family.fixtures[0]).join("config.json"));
            json["architectures"] = json!([name]);
            let spec = families::describe(&Config::parse(&json.to_string()).unwrap());
            assert_eq!(spec.map(|s| s.family).map_err(|e| e.to_string()), Ok(family.name), "{name}");
        }
    }
}

/// The sizes by hand, of a released model of each form of T.
#[test]
fn sizes_of_released_models() {
    let info = |model: &str| {
        let (spec, _) = describe(&golden("production_configs").join(format!("{model}.json")));
        ModelInfo::of(&spec, DType::Bf16)
    };
    // 30 gated delta nets of 32 heads [128, 128], 16 key heads, kernel 4; 10 layers of 2 heads of 256.
    let qwen = info("Qwen3.5-35B-A3B");
    let (state, operator) = (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128), 32 * 128 * 128);
    assert_eq!((qwen.linear_layers, qwen.attention_layers, qwen.latent_layers, qwen.expert_layers), (30, 10, 0, 40));
    assert_eq!(qwen.sequence_bytes, 30 * 4 * state);
    assert_eq!((qwen.transition.as_str(), qwen.entry_operator_bytes), ("dense", 30 * 4 * operator));
    assert_eq!(qwen.kv_bytes_per_token, 10 * 2 * 2 * 256 * 2);
    // T and S alone: 120 MiB, any length.
    assert_eq!(30 * 4 * (operator + 32 * 128 * 128), 120 << 20);
    assert_eq!(qwen.entry_bytes(8, 8), 0);
    let entry = 30 * 4 * (state + operator) + 512 * 4 + 10 * 2 * 256 * 2 * (512 + 504);
    assert_eq!(qwen.entry_bytes(512, 8), entry, "keys of 504 tokens take the room of 512");

    // 70 layers of lightning attention, 64 heads [128, 128], no convolution; 10 of 8 heads of 128.
    let minimax = info("MiniMax-M1");
    assert_eq!((minimax.linear_layers, minimax.attention_layers), (70, 10));
    assert_eq!((minimax.transition.as_str(), minimax.entry_operator_bytes), ("scalar", 70 * 4 * 64));
    assert_eq!(minimax.sequence_bytes, 70 * 4 * 64 * 128 * 128);
    assert_eq!(minimax.entry_recurrent_bytes, minimax.sequence_bytes + 70 * 4 * 64);
    assert_eq!(minimax.kv_bytes_per_token, 10 * 2 * 8 * 128 * 2);

    // 20 layers of delta attention, 32 heads [128, 128], kernel 4; 7 latents of 512 and a key of 64.
    let kimi = info("Kimi-Linear-48B-A3B");
    assert_eq!((kimi.linear_layers, kimi.attention_layers, kimi.latent_layers, kimi.expert_layers), (20, 7, 7, 26));
    assert_eq!(kimi.sequence_bytes, 20 * 4 * (32 * 128 * 128 + 3 * 3 * 32 * 128));
    assert_eq!((kimi.transition.as_str(), kimi.entry_operator_bytes), ("dense", 20 * 4 * 32 * 128 * 128));
    assert_eq!((kimi.kv_bytes_per_token, kimi.key_bytes_per_token), (7 * 2 * 576, 7 * 2 * 576));

    // Parameters as the models' names have them.
    for (model, billions) in [
        ("Qwen3.5-35B-A3B", 33.0..36.0),
        ("Qwen3.5-122B-A10B", 119.0..125.0),
        ("Qwen3-Next-80B-A3B", 78.0..81.0),
        ("Ring-mini-linear-2.0", 15.5..17.5),
        ("Kimi-Linear-48B-A3B", 47.0..50.0),
        ("MiniMax-M1", 450.0..460.0),
    ] {
        let parameters = info(model).parameters as f64 / 1e9;
        assert!(billions.contains(&parameters), "{model}: {parameters}");
    }
}
