//! Block-scaled fp8: each number times the scale of its block, whatever rows are asked for, and nothing else that is
//! called fp8.

use bytes::Bytes;
use half::bf16;
use hypic_kernels::Cpu;
use hypic_model::{Checkpoint, Item};
use hypic_state::DType;
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use crate::support::{Files, Stored, TOKENS, assert_refused, load, logits};

/// What an F8_E4M3 code stands for, by the format's definition.
fn number(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size = if exponent == 0 { mantissa * 2f32.powi(-9) } else { (8.0 + mantissa) * 2f32.powi(exponent - 10) };
    if code & 0x80 == 0 { size } else { -size }
}

fn is_number(code: u8) -> bool {
    code & 0x7f != 0x7f
}

/// Numbers that look random.
fn noise(n: usize, seed: u64) -> impl Iterator<Item = u64> {
    (0..n as u64).map(move |i| {
        let x = (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed.wrapping_mul(0xbf58_476d_1ce4_e5b9));
        let x = (x ^ (x >> 31)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 29)
    })
}

fn config(block: [usize; 2]) -> Value {
    json!({
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": block,
        "modules_to_not_convert": ["lm_head"],
    })
}

/// A tensor of random codes, its random scales, and what they mean.
struct Scaled {
    codes: Stored,
    scales: Stored,
    values: Vec<f32>,
}

impl Scaled {
    /// `size`: about how large a scale is.
    fn random(shape: &[usize], block: [usize; 2], bf: bool, seed: u64, size: f32) -> Self {
        let [leading @ .., n, k] = shape else { panic!("a matrix") };
        let matrices: usize = leading.iter().product();
        let (down, across) = (n.div_ceil(block[0]), k.div_ceil(block[1]));
        let codes: Vec<u8> = noise(matrices * n * k, seed)
            .map(|x| x as u8)
            .map(|code| if is_number(code) { code } else { code ^ 1 })
            .collect();
        let scales: Vec<f32> = noise(matrices * down * across, seed + 1)
            .map(|x| size * (0.001 + (x % 1000) as f32 / 700.0))
            .map(|scale| if bf { bf16::from_f32(scale).to_f32() } else { scale })
            .collect();
        let mut values = Vec::new();
        for (at, code) in codes.iter().enumerate() {
            let (matrix, row, column) = (at / (n * k), at / k % n, at % k);
            values.push(number(*code) * scales[(matrix * down + row / block[0]) * across + column / block[1]]);
        }
        let scales_shape = [leading, &[down, across]].concat();
        let scales = if bf {
            let data = scales.iter().flat_map(|s| bf16::from_f32(*s).to_le_bytes()).collect();
            Stored { dtype: Dtype::BF16, shape: scales_shape, data }
        } else {
            Stored::f32(&scales_shape, &scales)
        };
        let codes = Stored { dtype: Dtype::F8_E4M3, shape: shape.to_vec(), data: codes };
        Scaled { codes, scales, values }
    }
}

/// A checkpoint of one fp8 tensor `w`, in memory.
fn open(scaled: &Scaled, block: [usize; 2]) -> Checkpoint {
    let mut files = Files { config: json!({"quantization_config": config(block)}), tensors: Default::default() };
    files.tensors.insert("w".to_string(), scaled.codes.clone());
    files.tensors.insert("w_scale_inv".to_string(), scaled.scales.clone());
    Checkpoint::from_memory(files.config.to_string().as_bytes(), None, Bytes::from(files.bytes())).unwrap()
}

#[test]
fn any_rows_are_the_numbers_times_the_scales_of_their_blocks() {
    const BLOCK: [usize; 2] = [128, 128];
    let shapes: [&[usize]; 6] = [&[256, 128], &[200, 300], &[1, 1], &[129, 5], &[3, 130, 140], &[2, 2, 127, 129]];
    for (seed, shape) in shapes.into_iter().enumerate() {
        for bf in [false, true] {
            let scaled = Scaled::random(shape, BLOCK, bf, seed as u64, 1.0);
            let columns = *shape.last().unwrap();
            let rows = scaled.values.len() / columns;
            let whole = open(&scaled, BLOCK).tensor("w", shape).unwrap();
            assert_eq!((whole.dtype(), whole.shape()), (DType::F32, shape));
            assert_eq!(whole.to_f32(), scaled.values);
            for (from, to) in [(0, rows), (0, 1), (rows - 1, rows), (rows / 3, rows / 2), (rows / 2, rows / 2)] {
                let part = open(&scaled, BLOCK).rows("w", [rows, columns], from..to).unwrap();
                assert_eq!(part.shape(), [to - from, columns]);
                assert_eq!(part.to_f32(), scaled.values[from * columns..to * columns], "{shape:?} {from}..{to}");
            }
            // Piece by piece, with cuts inside of blocks and of matrices: everything is used, scales too.
            let checkpoint = open(&scaled, BLOCK);
            let mut read = Vec::new();
            for from in (0..rows).step_by(77) {
                assert!(checkpoint.check_all_used(&[]).is_err());
                read.extend(checkpoint.rows("w", [rows, columns], from..rows.min(from + 77)).unwrap().to_f32());
            }
            assert_eq!(read, scaled.values);
            checkpoint.check_all_used(&[]).unwrap();
        }
    }
}

#[test]
fn every_code_of_the_format() {
    let codes: Vec<u8> = (0..=255).filter(|c| is_number(*c)).collect();
    let (values, scale) = (codes.iter().map(|c| number(*c)).collect::<Vec<_>>(), Stored::f32(&[1, 1], &[1.0]));
    let codes = Stored { dtype: Dtype::F8_E4M3, shape: vec![2, 127], data: codes };
    let scaled = Scaled { codes, scales: scale, values };
    let got = open(&scaled, [128, 128]).tensor("w", &[2, 127]).unwrap().to_f32();
    let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&got), bits(&scaled.values), "signs of zero too");
    assert_eq!((got[1], got[8], got[126]), (1.0 / 512.0, 1.0 / 64.0, 448.0));
}

/// The golden model with all its larger matrices in fp8, and the same numbers in f32.
fn quantised(block: [usize; 2], bf: bool) -> (Files, Files) {
    let (mut fp8, mut wide) = (Files::plain(), Files::plain());
    for (seed, (name, stored)) in Files::plain().tensors.into_iter().enumerate() {
        if stored.shape.len() != 2 || !name.contains("layers") {
            continue;
        }
        // Numbers about as large as trained weights.
        let scaled = Scaled::random(&stored.shape, block, bf, seed as u64, 1.0 / 4096.0);
        wide.tensors.insert(name.clone(), Stored::f32(&stored.shape, &scaled.values));
        fp8.tensors.insert(format!("{name}_scale_inv"), scaled.scales);
        fp8.tensors.insert(name, scaled.codes);
    }
    (fp8.with("quantization_config", config(block)), wide)
}

#[test]
fn a_model_in_fp8_is_the_model_of_its_numbers() {
    for (block, bf) in [([128, 128], false), ([128, 128], true), ([24, 40], false)] {
        let (fp8, wide) = quantised(block, bf);
        let want = logits(wide.write().path());
        assert!(want.iter().all(|x| x.is_finite()));
        let dir = fp8.write();
        assert_eq!(logits(dir.path()), want, "{block:?}");
        assert_eq!(logits(fp8.write_sharded(|_| {}).path()), want, "{block:?} in shards");
        // Stored in fp8 it is computed in bf16, unless asked for otherwise.
        assert_eq!(Checkpoint::open(dir.path()).unwrap().dtype(), Some(DType::Bf16));
        let run = |files: &Files| {
            let rig = load(Cpu::new(1), files.write().path(), DType::Bf16).unwrap();
            rig.run(vec![Item::Run(TOKENS.to_vec())])
        };
        assert_eq!(run(&fp8), run(&wide), "rounded to bf16 once");
    }
}

const NAME: &str = "model.layers.2.linear_attn.out_proj.weight";

#[test]
fn fp8_without_its_scales_is_refused() {
    let (fp8, _) = quantised([128, 128], false);
    let scales = format!("{NAME}_scale_inv");
    let mut without = fp8.clone();
    without.tensors.remove(&scales);
    assert_refused(without.write().path(), &["model.safetensors", NAME, "F8_E4M3", &scales, "missing"]);
    // One scale for the whole tensor.
    without.tensors.insert(format!("{NAME}_scale"), Stored::f32(&[1], &[0.5]));
    assert_refused(without.write().path(), &[NAME, "one scale", "scales of blocks"]);
    // Scales, but nothing that says of which blocks.
    let unsaid = fp8.clone().with("quantization_config", Value::Null);
    assert_refused(unsaid.write().path(), &["F8_E4M3", "no quantization_config"]);
    // Other formats of eight bits.
    let mut other = fp8;
    other.tensors.get_mut(NAME).unwrap().dtype = Dtype::F8_E5M2;
    assert_refused(other.write().path(), &[NAME, "F8_E5M2", "F8_E4M3 with scales of its blocks"]);
}

#[test]
fn scales_must_fit_their_tensor() {
    let (fp8, _) = quantised([24, 40], false);
    let scales = format!("{NAME}_scale_inv");
    let right = fp8.tensors[&scales].clone();
    let shape = fp8.tensors[NAME].shape.clone();
    assert_eq!(right.shape, [shape[0].div_ceil(24), shape[1].div_ceil(40)]);
    let with = |stored: Stored| {
        let mut files = fp8.clone();
        files.tensors.insert(scales.clone(), stored);
        files
    };
    let (rows, columns) = (right.shape[0], right.shape[1]);
    let shapes: [&[usize]; 6] = [&[], &[1], &[1, 1], &[columns + 1, rows], &[rows + 1, columns], &[rows * columns]];
    for wrong in shapes {
        let stored = Stored::f32(wrong, &vec![1.0; wrong.iter().product()]);
        let words = ["model.safetensors", &scales, &format!("{wrong:?}"), &format!("[{rows}, {columns}]")];
        assert_refused(with(stored).write().path(), &words);
    }
    // Blocks of another size than config.json says.
    let other = fp8.clone().with("quantization_config", config([128, 128]));
    assert_refused(other.write().path(), &["_scale_inv", "has shape [8, 2]", "make it [2, 1]"]);
    for bad in [f32::NAN, f32::INFINITY, -1.0, 1e38] {
        let mut values = right.values();
        values[1] = bad;
        assert_refused(with(Stored::f32(&right.shape, &values)).write().path(), &[&scales, "which is no scale"]);
    }
    let half = Stored { dtype: Dtype::F16, shape: right.shape.clone(), data: vec![0; 2 * rows * columns] };
    assert_refused(with(half).write().path(), &[&scales, "F16", "f32 and bf16"]);
}

#[test]
fn scales_without_an_fp8_tensor_are_refused() {
    let (fp8, wide) = quantised([128, 128], false);
    let scales = format!("{NAME}_scale_inv");
    let mut files = fp8.clone();
    files.tensors.insert(NAME.to_string(), wide.tensors[NAME].clone());
    assert_refused(files.write().path(), &[&scales, "belongs to no part", NAME, "F32"]);
    let mut files = fp8;
    files.tensors.insert("extra.weight_scale_inv".to_string(), Stored::f32(&[1, 1], &[1.0]));
    assert_refused(files.write().path(), &["extra.weight_scale_inv", "there is no extra.weight to scale"]);
}

#[test]
fn codes_that_are_no_numbers_are_refused() {
    let (fp8, _) = quantised([128, 128], false);
    for code in [0x7f, 0xff] {
        let mut files = fp8.clone();
        let stored = files.tensors.get_mut(NAME).unwrap();
        let columns = stored.shape[1];
        stored.data[3 * columns + 5] = code;
        assert_refused(files.write().path(), &[NAME, &format!("{code:#04x}"), "row 3, column 5"]);
    }
    let mut vector = fp8;
    let norm = vector.tensors.get_mut("model.norm.weight").unwrap();
    (norm.dtype, norm.data) = (Dtype::F8_E4M3, vec![0x38; norm.shape[0]]);
    vector.tensors.insert("model.norm.weight_scale_inv".to_string(), Stored::f32(&[1], &[1.0]));
    assert_refused(vector.write().path(), &["model.norm.weight", "F8_E4M3", "for matrices"]);
}

#[test]
fn what_a_quantised_configuration_may_say() {
    let (fp8, _) = quantised([128, 128], false);
    let want = logits(fp8.write().path());
    let set = |key: &str, value: Value| fp8.clone().with(&format!("quantization_config.{key}"), value);
    for (key, value) in [
        ("fmt", json!("float8_e4m3fn")),
        ("fmt", json!(null)),
        ("activation_scheme", json!(null)),
        ("modules_to_not_convert", json!(null)),
        ("ignored_layers", json!(["model.layers.0.linear_attn.conv1d"])),
        ("dequantize", json!(false)),
        ("weight_scale", json!(null)),
    ] {
        assert_eq!(logits(set(key, value).write().path()), want, "{key}");
    }
    for (key, value, word) in [
        ("quant_method", json!("gptq"), "block-scaled fp8"),
        ("quant_method", json!(null), "block-scaled fp8"),
        ("fmt", json!("e5m2"), "e4m3"),
        ("activation_scheme", json!("static"), "dynamic"),
        ("weight_block_size", json!(null), "scales of blocks"),
        ("scale_fmt", json!("ue8m0"), "ue8m0"),
        ("bits", json!(4), "4"),
    ] {
        assert_refused(set(key, value).write().path(), &["quantization_config", key, word, "served"]);
    }
    for block in
        [json!([128]), json!([128, 128, 128]), json!([0, 128]), json!("128"), json!([-1, 128]), json!([1.5, 2])]
    {
        assert_refused(
            set("weight_block_size", block).write().path(),
            &["quantization_config.weight_block_size", "must be"],
        );
    }
    for key in ["modules_to_not_convert", "ignored_layers"] {
        assert_refused(set(key, json!("lm_head")).write().path(), &[key, "list of strings"]);
    }
    assert_refused(fp8.clone().with("quantization_config", json!("fp8")).write().path(), &["must be an object"]);
}
