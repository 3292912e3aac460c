//! Every tensor of the model filled, every tensor of the file used, with the numbers that it holds.

use half::{bf16, f16};
use hypic_kernels::{Cpu, Isa, Reference};
use hypic_model::{Checkpoint, Item};
use hypic_state::DType;
use safetensors::tensor::Dtype;
use serde_json::json;

use crate::support::{Files, Stored, TOKENS, assert_close, assert_refused, golden, load, logits};

#[test]
fn every_tensor_is_needed() {
    let files = Files::plain();
    for name in files.tensors.keys() {
        let mut without = files.clone();
        without.tensors.remove(name);
        assert_refused(without.write().path(), &[name, "lacks", "expected"]);
    }
}

#[test]
fn every_tensor_must_have_its_shape() {
    let files = Files::plain();
    for (name, stored) in &files.tensors {
        let mut wrong = files.clone();
        let mut shape = stored.shape.clone();
        shape[0] += 1;
        let values = vec![0.5; shape.iter().product()];
        wrong.tensors.insert(name.clone(), Stored::f32(&shape, &values));
        assert_refused(wrong.write().path(), &["model.safetensors", name, &format!("{shape:?}"), "config.json"]);
    }
    // As many numbers in another shape.
    let mut wrong = files.clone();
    wrong.tensors.get_mut("model.layers.0.mlp.down_proj.weight").unwrap().shape = vec![32, 128];
    assert_refused(wrong.write().path(), &["model.layers.0.mlp.down_proj.weight", "[32, 128]", "[64, 64]"]);
}

/// transformers saves the layers of Kimi-Linear that have no experts under the name of those that have.
#[test]
fn names_that_some_checkpoints_have() {
    let files = Files::golden("kimi_linear");
    let mut renamed = files.clone();
    for part in ["gate_proj", "up_proj", "down_proj"] {
        let [ours, theirs] = ["mlp", "block_sparse_moe"].map(|at| format!("model.layers.0.{at}.{part}.weight"));
        let tensor = renamed.tensors.remove(&ours).expect("a layer without experts");
        renamed.tensors.insert(theirs, tensor);
    }
    assert_eq!(logits(renamed.write().path()), logits(&golden("kimi_linear")));
    // Elsewhere the same name is one of those that are described.
    for (name, pairs) in [
        ("bailing_hybrid", &[("model.layers.0.attention.o_proj", "model.layers.0.attention.dense")][..]),
        ("olmo_hybrid", &[("model.layers.3.post_attention_layernorm", "model.layers.3.feedforward_layer_norm")]),
        ("qwen3_5", &[("model.", "model.language_model.")]),
        ("nemotron_h_moe", &[("backbone.", "model.")]),
    ] {
        let files = Files::golden(name);
        let mut renamed = files.clone();
        renamed.tensors.clear();
        for (tensor, stored) in files.tensors {
            let other =
                pairs.iter().find_map(|(ours, theirs)| tensor.strip_prefix(ours).map(|rest| format!("{theirs}{rest}")));
            renamed.tensors.insert(other.unwrap_or(tensor), stored);
        }
        assert_eq!(logits(renamed.write().path()), logits(&golden(name)), "{name}");
    }
    // Not both.
    let mut twice = files;
    let (ours, theirs) = ("model.layers.0.mlp.up_proj.weight", "model.layers.0.block_sparse_moe.up_proj.weight");
    twice.tensors.insert(theirs.to_string(), twice.tensors[ours].clone());
    assert_refused(twice.write().path(), &[theirs, "belongs to no part"]);
}

#[test]
fn a_tensor_that_the_model_lacks_is_refused() {
    for name in ["extra", "model.layers.8.input_layernorm.weight", "model.layers.0.mlp.up_proj.weight_scale_inv"] {
        let mut files = Files::plain();
        files.tensors.insert(name.to_string(), Stored::f32(&[2], &[0.0, 0.0]));
        assert_refused(files.write().path(), &["model.safetensors", name, "belongs to no part"]);
    }
    // What the engine knows and does not serve is named, not refused.
    let rig = load(Cpu::new(1), &golden("qwen3_5_vlm"), DType::F32).unwrap();
    assert!(rig.model.ignored().iter().any(|prefix| prefix == "model.visual."), "{:?}", rig.model.ignored());
}

/// Every tensor through a narrower type and back.
fn rounded(files: &Files, round: impl Fn(f32) -> f32) -> Files {
    let mut files = files.clone();
    for t in files.tensors.values_mut() {
        let values: Vec<f32> = t.values().into_iter().map(&round).collect();
        *t = Stored::f32(&t.shape.clone(), &values);
    }
    files
}

fn stored_as<const N: usize>(files: &Files, dtype: Dtype, narrow: impl Fn(f32) -> [u8; N]) -> Files {
    let mut files = files.clone();
    for t in files.tensors.values_mut() {
        t.data = t.values().into_iter().flat_map(&narrow).collect();
        t.dtype = dtype;
    }
    files
}

#[test]
fn half_precision_weights_are_the_numbers_they_hold() {
    let files = Files::plain();
    let bf = stored_as(&files, Dtype::BF16, |x| bf16::from_f32(x).to_le_bytes());
    let wide = rounded(&files, |x| bf16::from_f32(x).to_f32());
    let dir = bf.write();
    assert_eq!(Checkpoint::open(dir.path()).unwrap().dtype(), Some(DType::Bf16));
    assert_eq!(logits(dir.path()), logits(wide.write().path()), "bf16");

    let half = stored_as(&files, Dtype::F16, |x| f16::from_f32(x).to_le_bytes());
    let wide = rounded(&files, |x| f16::from_f32(x).to_f32());
    let dir = half.write();
    assert_eq!(Checkpoint::open(dir.path()).unwrap().dtype(), Some(DType::F16));
    assert_eq!(logits(dir.path()), logits(wide.write().path()), "f16");

    // One file of both kinds, so that one packed layer has rows of each.
    let mut mixed = files.clone();
    for (i, (name, t)) in mixed.tensors.iter_mut().enumerate() {
        if i % 2 == 0 {
            *t = bf.tensors[name].clone();
        }
    }
    let mut wide = files.clone();
    for (i, t) in wide.tensors.values_mut().enumerate() {
        if i % 2 == 0 {
            let values: Vec<f32> = t.values().into_iter().map(|x| bf16::from_f32(x).to_f32()).collect();
            *t = Stored::f32(&t.shape.clone(), &values);
        }
    }
    assert_eq!(logits(mixed.write().path()), logits(wide.write().path()), "mixed");
}

#[test]
fn other_dtypes_are_refused_by_name() {
    let name = "model.layers.2.linear_attn.out_proj.weight";
    for (dtype, bytes) in
        [(Dtype::F64, 8), (Dtype::I64, 8), (Dtype::I32, 4), (Dtype::U8, 1), (Dtype::BOOL, 1), (Dtype::F8_E5M2, 1)]
    {
        let mut files = Files::plain();
        let t = files.tensors.get_mut(name).unwrap();
        (t.dtype, t.data) = (dtype, vec![0; t.shape.iter().product::<usize>() * bytes]);
        assert_refused(files.write().path(), &["model.safetensors", name, &format!("{dtype:?}"), "f32, bf16 and f16"]);
    }
    let fp8 = "F8_E4M3 with scales of its blocks";
    let mut files = Files::plain();
    let t = files.tensors.get_mut(name).unwrap();
    (t.dtype, t.data) = (Dtype::I8, vec![0; t.shape.iter().product()]);
    assert_refused(files.write().path(), &[name, "I8", fp8]);
}

#[test]
fn bf16_is_computed_on_every_instruction_set() {
    let dir = golden("qwen3_5");
    let exact = logits(&dir);
    let largest = exact.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
    for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
        let rig = load(Cpu::with_isa(1, isa), &dir, DType::Bf16).unwrap();
        let got = rig.run(vec![Item::Run(TOKENS.to_vec())]);
        // Eight bits of mantissa through eight layers.
        assert_close(&format!("{isa:?}"), &got, &exact, 0.05 * largest);
        assert_ne!(got, exact, "{isa:?}: bf16 was asked for");
    }
}

#[test]
fn tied_and_untied_heads() {
    let embed = "model.embed_tokens.weight";
    let untied = Files::plain();
    let head = untied.tensors["lm_head.weight"].clone();

    // Untied without a head.
    let mut files = untied.clone();
    files.tensors.remove("lm_head.weight");
    assert_refused(files.write().path(), &["lm_head.weight", "[256, 64]", "tie_word_embeddings", "true"]);

    // Tied: the head is the embedding, with or without a copy of it.
    let tied = files.clone().with("tie_word_embeddings", json!(true));
    let mut same = files.clone();
    same.tensors.insert("lm_head.weight".to_string(), files.tensors[embed].clone());
    let want = logits(same.write().path());
    assert_eq!(logits(tied.write().path()), want);
    assert_eq!(logits(same.clone().with("tie_word_embeddings", json!(true)).write().path()), want);
    assert_ne!(logits(untied.write().path()), want);

    // Tied with another head.
    let mut other = tied.clone();
    other.tensors.insert("lm_head.weight".to_string(), head);
    assert_refused(other.write().path(), &["model.safetensors", "lm_head.weight", embed, "tie_word_embeddings"]);
}

#[test]
fn the_tie_flag_counts_at_either_level() {
    let release = Files::release();
    let want = logits(&golden("qwen3_5_vlm"));
    let outer = release.clone().with("text_config.tie_word_embeddings", json!(null));
    let inner = release.clone().with("tie_word_embeddings", json!(null));
    assert_eq!(logits(outer.write().path()), want);
    assert_eq!(logits(inner.write().path()), want);
    let neither = inner.with("text_config.tie_word_embeddings", json!(null));
    assert_refused(neither.write().path(), &["lm_head.weight", "tie_word_embeddings"]);
    let text_says_no = release.with("text_config.tie_word_embeddings", json!(false));
    assert_refused(text_says_no.write().path(), &["lm_head.weight", "tie_word_embeddings"]);
}

#[test]
fn weights_that_are_no_numbers_are_loaded_as_such() {
    let mut files = Files::plain();
    let t = files.tensors.get_mut("model.layers.0.mlp.down_proj.weight").unwrap();
    let mut values = t.values();
    values[0] = f32::NAN;
    *t = Stored::f32(&t.shape.clone(), &values);
    let dir = files.write();
    for logit in [
        logits(dir.path())[0],
        load(Reference::<f32>::new(), dir.path(), DType::F32).unwrap().run(vec![Item::Run(vec![1])])[0],
    ] {
        assert!(logit.is_nan());
    }
}

/// MiniMax as transformers stores it has its decays, which count where they are not those of the configuration.
#[test]
fn stored_slopes_count() {
    let (name, head) = ("model.layers.3.self_attn.slope_rate", 2);
    let files = Files::golden("minimax");
    let scaled = |factor: f32| {
        let mut files = files.clone();
        let t = files.tensors.get_mut(name).expect("it is stored");
        let mut values = t.values();
        values[head] *= factor;
        *t = Stored::f32(&t.shape.clone(), &values);
        files
    };
    let want = logits(&golden("minimax"));
    assert_eq!(logits(scaled(1.000_05).write().path()), want, "close enough");
    for factor in [1.0003, 2.0] {
        assert_ne!(logits(scaled(factor).write().path()), want, "{factor}");
    }
    for factor in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let words = ["model.safetensors", name, "at 2", "above 0"];
        assert_refused(scaled(factor).write().path(), &words);
    }
    // Rounded, or left out.
    let mut narrow = files.clone();
    let mut bare = files.clone();
    for (tensor, t) in narrow.tensors.iter_mut().filter(|(tensor, _)| tensor.ends_with("slope_rate")) {
        t.data = t.values().into_iter().flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect();
        t.dtype = Dtype::BF16;
        bare.tensors.remove(tensor);
    }
    assert_eq!(logits(narrow.write().path()), want, "bf16");
    assert_eq!(logits(bare.write().path()), want, "without");
    // Of another shape, or of a layer that has none.
    let mut wrong = files.clone();
    wrong.tensors.get_mut(name).expect("it is stored").shape = vec![2, 2, 1];
    assert_refused(wrong.write().path(), &[name, "[2, 2, 1]", "[4]"]);
    let mut full = files.clone();
    full.tensors.insert("model.layers.7.self_attn.slope_rate".to_string(), files.tensors[name].clone());
    assert_refused(full.write().path(), &["model.layers.7.self_attn.slope_rate", "belongs to no part"]);
    // What follows from them is ignored, told once for all layers.
    let rig = load(Cpu::new(1), &golden("minimax"), DType::F32).expect("a checkpoint");
    let ignored = ["diagonal_decay", "key_decay", "query_decay"].map(|t| format!("model.layers.*.self_attn.{t}"));
    assert_eq!(rig.model.ignored(), ignored);
    let mut other = files;
    other.tensors.insert("model.layers.x.self_attn.key_decay".to_string(), Stored::f32(&[1], &[0.0]));
    assert_refused(other.write().path(), &["model.layers.x.self_attn.key_decay", "belongs to no part"]);
}

/// transformers holds the three convolutions of OLMo's delta nets in one and saves it in equal parts.
#[test]
fn convolutions_may_be_cut_elsewhere() {
    let files = Files::golden("olmo_hybrid");
    let names = ["q", "k", "v"].map(|part| format!("model.layers.1.linear_attn.{part}_conv1d.weight"));
    let shape = &files.tensors[&names[0]].shape;
    let taps = shape[shape.len() - 1];
    let all: Vec<f32> = names.iter().flat_map(|name| files.tensors[name].values()).collect();
    let rows = all.len() / taps;
    let third = rows.div_ceil(3);
    let cut = |cuts: [usize; 2]| {
        let mut files = files.clone();
        for (name, (from, to)) in names.iter().zip([(0, cuts[0]), (cuts[0], cuts[1]), (cuts[1], rows)]) {
            let stored = Stored::f32(&[to - from, 1, taps], &all[from * taps..to * taps]);
            files.tensors.insert(name.clone(), stored);
        }
        files
    };
    let want = logits(&golden("olmo_hybrid"));
    assert_eq!(logits(cut([third, 2 * third]).write().path()), want);
    // But none may be missing or too short.
    let mut short = cut([third, 2 * third]);
    let stored = short.tensors.get_mut(&names[2]).expect("just cut");
    *stored = Stored::f32(&[rows - 2 * third - 1, 1, taps], &all[(2 * third + 1) * taps..]);
    assert_refused(short.write().path(), &["_conv1d.weight", "config.json makes it"]);
}
