//! Scaled rotary embeddings: the numbers of the reference implementation, from every place and in every spelling, and
//! nothing guessed.
//!
//! The reference numbers are those of transformers 5.24.0 (torch 2.15.0) for the same parameters, computed in float64
//! with 8192 positions and heads of 32 dimensions: `ROPE_INIT_FUNCTIONS` of its `modeling_rope_utils`, and
//! `yarn_get_mscale` of its DeepSeek-V3 for the softmax of MLA.

use hypic_kernels::RopeSpec;
use hypic_model::spec::MixerSpec;
use hypic_model::{Config, DynamicNtk, families};
use serde_json::{Value, json};

use crate::support::Files;

/// The embedding of the first attention layer, whose heads have 32 dimensions.
fn described(files: &Files) -> Result<RopeSpec, String> {
    let config = Config::parse(&files.config.to_string()).unwrap();
    let spec = families::describe(&config).map_err(|e| e.to_string())?;
    let mixers = spec.layers.iter().map(|layer| &layer.mixer.body);
    let mut embeddings = mixers.filter_map(|mixer| match mixer {
        MixerSpec::Attention(attention) => attention.rope.clone(),
        _ => None,
    });
    Ok(embeddings.next().expect("a layer of full attention"))
}

/// The golden model, of 8192 positions, with nothing said about the embedding but its share of a head.
fn bare(partial: f64) -> Files {
    let files = Files::plain().with("rope_parameters", Value::Null).with("max_position_embeddings", json!(8192));
    files.with("partial_rotary_factor", json!(partial))
}

#[track_caller]
fn assert_embedding(got: &RopeSpec, frequencies: &[f64], scale: f64) {
    assert_eq!((got.offset, got.interleaved, got.inv_freq.len()), (0, false, frequencies.len()));
    for (got, want) in got.inv_freq.iter().zip(frequencies) {
        assert!((got / want - 1.0).abs() < 1e-11, "{got} instead of {want}");
    }
    assert!((got.scale / scale - 1.0).abs() < 1e-14, "{} instead of {scale}", got.scale);
}

#[track_caller]
fn assert_refused(files: &Files, words: &[&str]) {
    let message = described(files).expect_err("refused");
    for word in words {
        assert!(message.contains(word), "{word:?} is not in: {message}");
    }
}

/// Parameters, the share of a head that rotates, frequencies and the factor on cosine and sine.
fn reference() -> Vec<(Value, f64, Vec<f64>, f64)> {
    vec![
        (
            json!({"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}),
            1.0,
            vec![
                0.25,
                0.140585331298,
                0.0790569415042,
                0.044456985251,
                0.025,
                0.0140585331298,
                0.00790569415042,
                0.0044456985251,
                0.0025,
                0.00140585331298,
                0.000790569415042,
                0.00044456985251,
                0.00025,
                0.000140585331298,
                7.90569415042e-05,
                4.4456985251e-05,
            ],
            1.0,
        ),
        (
            json!({"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}),
            1.0,
            vec![
                1.0,
                0.56234132519,
                0.316227766017,
                0.177827941004,
                0.1,
                0.056234132519,
                0.0316227766017,
                0.0177827941004,
                0.01,
                0.0056234132519,
                0.00316227766017,
                0.00177827941004,
                0.001,
                0.00056234132519,
                0.000316227766017,
                0.000177827941004,
            ],
            1.0,
        ),
        (
            json!({"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0,
                   "original_max_position_embeddings": 2048}),
            1.0,
            vec![
                1.0,
                0.56234132519,
                0.316227766017,
                0.177827941004,
                0.1,
                0.050209046892,
                0.0248464673299,
                0.0120668959967,
                0.00571428571429,
                0.00261087043838,
                0.00112938487863,
                0.00044456985251,
                0.00025,
                0.000140585331298,
                7.90569415042e-05,
                4.4456985251e-05,
            ],
            1.138629436111989,
        ),
        (
            json!({"rope_type": "yarn", "factor": 40.0, "rope_theta": 10000.0, "beta_fast": 32, "beta_slow": 1,
                   "mscale": 0.707, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}),
            1.0,
            vec![
                1.0,
                0.56234132519,
                0.316227766017,
                0.177827941004,
                0.1,
                0.056234132519,
                0.027218175575,
                0.0128290157439,
                0.00582142857143,
                0.00249036872584,
                0.000959977146837,
                0.000292145903078,
                2.5e-05,
                1.40585331298e-05,
                7.90569415042e-06,
                4.4456985251e-06,
            ],
            0.9210423553163399,
        ),
        (
            json!({"rope_type": "yarn", "factor": 8.0, "rope_theta": 500000.0, "beta_fast": 16, "beta_slow": 2,
                   "attention_factor": 1.25, "truncate": false, "original_max_position_embeddings": 4096}),
            1.0,
            vec![
                1.0,
                0.440366602672,
                0.193922744749,
                0.0853971002858,
                0.0376060309309,
                0.0138188046095,
                0.00356859244073,
                0.000463197339875,
                0.000176776695297,
                7.78465527393e-05,
                3.42810219595e-05,
                1.50962171764e-05,
                6.64786987118e-06,
                2.92749987018e-06,
                1.28917317215e-06,
                5.67708810076e-07,
            ],
            1.25,
        ),
        (
            json!({"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000000.0,
                   "original_max_position_embeddings": 262144}),
            0.5,
            vec![
                1.0,
                0.133352143216,
                0.0177827941004,
                0.00237137370566,
                0.000237170824513,
                2.10848251714e-05,
                1.40585331298e-06,
                1.87473552333e-07,
            ],
            1.138629436111989,
        ),
        (
            json!({"rope_type": "llama3", "factor": 8.0, "rope_theta": 500000.0, "low_freq_factor": 1.0,
                   "high_freq_factor": 4.0, "original_max_position_embeddings": 256}),
            1.0,
            vec![
                1.0,
                0.440366602672,
                0.193922744749,
                0.072430035165,
                0.0105382327465,
                0.00207005501012,
                0.000911583092152,
                0.000401430749344,
                0.000176776695297,
                7.78465527393e-05,
                3.42810219595e-05,
                1.50962171764e-05,
                6.64786987118e-06,
                2.92749987018e-06,
                1.28917317215e-06,
                5.67708810076e-07,
            ],
            1.0,
        ),
        (
            json!({"rope_type": "llama3", "factor": 32.0, "rope_theta": 10000.0, "low_freq_factor": 1.0,
                   "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}),
            0.5,
            vec![
                1.0,
                0.316227766017,
                0.1,
                0.0316227766017,
                0.00234605678491,
                9.88211768803e-05,
                3.125e-05,
                9.88211768803e-06,
            ],
            1.0,
        ),
    ]
}

fn renamed(parameters: &Value, from: &str, to: &str) -> Value {
    let mut renamed = parameters.clone();
    let value = renamed.as_object_mut().unwrap().remove(from).expect("it is there");
    renamed[to] = value;
    renamed
}

#[test]
fn frequencies_and_factors_are_those_of_the_reference() {
    for (parameters, partial, frequencies, scale) in reference() {
        let check = |files: Files| assert_embedding(&described(&files).unwrap(), &frequencies, scale);
        check(bare(partial).with("rope_parameters", parameters.clone()));
        check(bare(partial).with("rope_scaling", parameters.clone()));
        check(bare(partial).with("rope_scaling", renamed(&parameters, "rope_type", "type")));
        let mut both = parameters.clone();
        both["type"] = parameters["rope_type"].clone();
        check(bare(partial).with("rope_scaling", both));
        check(bare(partial).with("rope_parameters", json!({"full_attention": parameters})));
        // What is not the scaling's own may stand above it.
        for key in ["rope_theta", "original_max_position_embeddings"] {
            let Some(value) = parameters.get(key) else { continue };
            let inner = renamed(&parameters, key, "unread");
            check(bare(partial).with("rope_scaling", inner).with(key, value.clone()));
        }
        // Beside the text model's configuration.
        let mut outer = bare(partial);
        outer.config = json!({"architectures": outer.config["architectures"], "text_config": outer.config});
        check(outer.clone().with("rope_scaling", parameters.clone()));
        check(outer.with("text_config.rope_scaling", parameters.clone()).with("rope_scaling", parameters.clone()));
    }
}

#[test]
fn for_text_mrope_is_the_plain_embedding() {
    let plain = described(&bare(0.5)).unwrap();
    let want: Vec<f64> = (0..8).map(|i| 1e4f64.powf(-f64::from(i) / 8.0)).collect();
    assert_embedding(&plain, &want, 1.0);
    for parameters in [
        json!({"type": "mrope", "mrope_section": [2, 3, 3]}),
        json!({"rope_type": "default", "type": "mrope", "mrope_section": [2, 3, 3]}),
        json!({"mrope_section": [2, 3, 3], "mrope_interleaved": true}),
        json!({"rope_type": "default"}),
        json!({}),
        json!(null),
    ] {
        assert_eq!(described(&bare(0.5).with("rope_scaling", parameters)), Ok(plain.clone()));
    }
}

#[test]
fn each_spelling_of_the_rotated_dimensions() {
    let none = bare(0.5).with("partial_rotary_factor", Value::Null);
    let want = described(&bare(0.5)).unwrap();
    assert_eq!(want.inv_freq.len(), 8);
    for key in ["rotary_dim", "attn_rotary_emb"] {
        let counted = none.clone().with(key, json!(16));
        assert_eq!(described(&counted), Ok(want.clone()), "{key}");
        // Both, if they agree.
        assert_eq!(described(&counted.clone().with("partial_rotary_factor", json!(0.5))), Ok(want.clone()));
        assert_refused(&counted.with("partial_rotary_factor", json!(0.25)), &[key, "16", "8 of 32"]);
        for bad in [json!(33), json!(-2), json!(7.5)] {
            assert_refused(&none.clone().with(key, bad), &["config.json", key, "whole number up to the 32"]);
        }
        assert_refused(&none.clone().with(key, json!(7)), &["config.json", key, "pairs"]);
    }
    let nested = none.clone().with("rope_parameters", json!({"rope_type": "default", "partial_rotary_factor": 0.5}));
    assert_eq!(described(&nested), Ok(want));
    assert_eq!(described(&none.with("rotary_dim", json!(0))).unwrap().inv_freq.len(), 0);
}

#[test]
fn yarn_lengths_that_are_not_named_follow_from_the_others() {
    let yarn = |parameters: Value| {
        let files = bare(1.0).with("rope_theta", json!(10000.0));
        described(&files.with("rope_scaling", parameters))
    };
    let named = |factor: f64, original: usize| {
        yarn(json!({"type": "yarn", "factor": factor, "original_max_position_embeddings": original})).unwrap()
    };
    assert_eq!(yarn(json!({"type": "yarn", "original_max_position_embeddings": 2048})), Ok(named(4.0, 2048)));
    assert_eq!(yarn(json!({"type": "yarn", "factor": 3.0})), Ok(named(3.0, 8192)));
    let zeros = json!({"type": "yarn", "factor": 3.0, "mscale": 0, "mscale_all_dim": 0, "attention_factor": null});
    assert_eq!(yarn(zeros), Ok(named(3.0, 8192)));
    // Beside the object it counts more than in it.
    let two = bare(1.0).with("rope_theta", json!(10000.0)).with("original_max_position_embeddings", json!(1024));
    let inner = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048});
    assert_eq!(described(&two.with("rope_scaling", inner)), Ok(named(4.0, 1024)));
    let error = yarn(json!({"type": "yarn"})).unwrap_err();
    assert!(error.contains("rope_scaling.factor: is missing"), "{error}");
    // A factor of 1 changes nothing.
    let plain = described(&bare(1.0).with("rope_theta", json!(10000.0))).unwrap();
    assert_embedding(&named(1.0, 2048), &plain.inv_freq, 1.0);
}

/// Up to the original maximum, which may have a name of its own, everything can be used again; how far the model goes
/// beyond it is named, or follows from the factor.
#[test]
fn scaling_takes_a_model_farther() {
    let positions = |parameters: Value| {
        let files = bare(1.0).with("rope_scaling", parameters);
        let spec = families::describe(&Config::parse(&files.config.to_string()).unwrap()).unwrap();
        (spec.reusable(), spec.max_positions)
    };
    let named = |original: usize, factor: f64| {
        positions(json!({"type": "dynamic", "factor": factor, "original_max_position_embeddings": original}))
    };
    // In transformers a smaller original maximum has no bearing on the embedding.
    assert_eq!(named(2048, 4.0), (Some(2048), 32768));
    assert_eq!(named(16384, 4.0), (Some(8192), 32768));
    assert_eq!(named(8192, 2.5), (Some(8192), 20480));
    assert_eq!(positions(json!({"type": "dynamic", "factor": 4.0})), (Some(8192), 32768));
    assert_eq!(positions(json!({"type": "dynamic", "factor": 1e9})), (Some(8192), u32::MAX as usize));
    // The others that stretch what the model was made for.
    assert_eq!(positions(json!({"type": "linear", "factor": 4.0})), (None, 32768));
    assert_eq!(positions(json!({"type": "yarn", "factor": 4.0})), (None, 32768));
    let yarn = |original: usize| {
        positions(json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": original}))
    };
    assert_eq!((yarn(1024), yarn(2048), yarn(4096)), ((None, 8192), (None, 8192), (None, 16384)));
    let llama = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                       "original_max_position_embeddings": 256});
    assert_eq!(positions(llama), (None, 8192));
    // A model that does not rotate has nothing to scale.
    let still = Files::golden("kimi_linear").with("rope_scaling", json!({"type": "dynamic", "factor": 4.0}));
    let spec = families::describe(&Config::parse(&still.config.to_string()).unwrap()).unwrap();
    assert_eq!((spec.reusable(), spec.max_positions), (None, 4096));
}

#[test]
fn dynamic_scaling_grows_from_the_original_maximum_on() {
    let dynamic = DynamicNtk { original: 2048, reusable: 2048, factor: 4.0 };
    for (tokens, alpha) in [(0, 1.0), (2048, 1.0), (2049, 1.0 + 4.0 / 2048.0), (4096, 5.0), (8192, 13.0)] {
        assert!((dynamic.alpha(tokens) - alpha).abs() < 1e-12, "{tokens}: {}", dynamic.alpha(tokens));
    }
}

#[test]
fn parameters_of_a_scaling_are_checked() {
    let llama = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                       "original_max_position_embeddings": 256});
    let yarn = json!({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256});
    let linear = json!({"rope_type": "linear", "factor": 8.0});
    let dynamic = json!({"rope_type": "dynamic", "factor": 8.0});
    let set = |base: &Value, key: &str, value: Value| {
        let mut parameters = base.clone();
        parameters[key] = value;
        bare(1.0).with("rope_scaling", parameters)
    };
    for base in [&llama, &yarn, &linear, &dynamic] {
        assert!(described(&bare(1.0).with("rope_scaling", base.clone())).is_ok());
        for bad in [json!(0.5), json!(0), json!(-1.0)] {
            assert_refused(&set(base, "factor", bad), &["config.json: rope_scaling.factor", "1 or more"]);
        }
        assert_refused(&set(base, "factor", json!("8")), &["rope_scaling.factor", "a number"]);
    }
    for (base, key) in [
        (&linear, "factor"),
        (&dynamic, "factor"),
        (&llama, "factor"),
        (&llama, "low_freq_factor"),
        (&llama, "high_freq_factor"),
    ] {
        assert_refused(&set(base, key, json!(null)), &[&format!("config.json: rope_scaling.{key}: is missing")]);
    }
    for (base, key, value, word) in [
        (&llama, "high_freq_factor", json!(1.0), "not above low_freq_factor"),
        (&llama, "low_freq_factor", json!(0), "above 0"),
        (&llama, "original_max_position_embeddings", json!(0), "1 or more"),
        (&yarn, "original_max_position_embeddings", json!(-1), "1 or more"),
        (&yarn, "beta_fast", json!(0.5), "less than beta_slow"),
        (&yarn, "beta_slow", json!(-1), "above 0"),
        (&yarn, "attention_factor", json!(0), "above 0"),
        (&yarn, "mscale", json!(-1), "0 or more"),
        (&yarn, "truncate", json!(1), "true or false"),
        (&yarn, "attn_factor", json!(2), "only 1 is served"),
        (&yarn, "extrapolation_factor", json!(0.5), "only 1 is served"),
        (&yarn, "rope_theta", json!(1.0), "above 1"),
        (&llama, "mscale", json!(1.0), "yarn alone"),
        (&linear, "mscale_all_dim", json!(1.0), "yarn alone"),
        (&dynamic, "mscale_all_dim", json!(0.5), "yarn alone"),
    ] {
        assert_refused(&set(base, key, value), &["config.json", &format!("rope_scaling.{key}"), word]);
    }
}

#[test]
fn contradictions_and_omissions_are_refused() {
    let linear = json!({"rope_type": "linear", "factor": 8.0});
    let files = bare(1.0).with("rope_scaling", linear.clone());
    let plain = json!({"rope_type": "default"});
    assert_refused(&files.with("rope_parameters", plain), &["rope_scaling.rope_type", "linear", "rope_parameters"]);
    let two = json!({"rope_type": "linear", "type": "yarn", "factor": 8.0});
    assert_refused(&bare(1.0).with("rope_scaling", two), &["rope_scaling.type", "yarn", "another type"]);
    assert_refused(&bare(1.0).with("rope_scaling", json!({"factor": 8.0})), &["rope_scaling.rope_type: is missing"]);
    for bad in [json!("yarn"), json!([]), json!(2)] {
        assert_refused(&bare(1.0).with("rope_scaling", bad), &["rope_scaling", "object"]);
    }
    assert_refused(&bare(1.0).with("rope_scaling", json!({"type": 1})), &["rope_scaling.type", "a string"]);
    for files in [bare(1.0), Files::golden("bailing_moe_v2_5")] {
        let untyped = files.with("rope_scaling", json!({"mscale_all_dim": 1.0}));
        assert_refused(&untyped, &["config.json: rope_scaling.mscale_all_dim = 1.0", "yarn alone"]);
    }
}

/// Factor on the softmax scale and on cosine and sine of an MLA model.
#[test]
fn latent_attention_scales_its_softmax_under_yarn() {
    let latent = |parameters: Value| {
        let files = Files::golden("bailing_moe_v2_5").with("rope_scaling", parameters);
        let config = Config::parse(&files.config.to_string()).unwrap();
        let spec = families::describe(&config).unwrap();
        let mut latent = spec.layers.into_iter().filter_map(|layer| match layer.mixer.body {
            MixerSpec::Latent(latent) => Some((f64::from(latent.scale), latent.rope.expect("it rotates"))),
            _ => None,
        });
        latent.next().expect("a layer of MLA")
    };
    let (plain, embedding) = latent(json!(null));
    assert_eq!((embedding.scale, embedding.inv_freq.len()), (1.0, 4), "all of the rotary part");
    // The squares of transformers' `yarn_get_mscale(factor, mscale_all_dim)`.
    for (factor, all, square) in [(40.0, 1.0, 1.8738542070926265), (4.0, 0.707, 1.2056281810045126), (1.0, 1.0, 1.0)] {
        let (scaled, embedding) = latent(json!({
            "type": "yarn", "factor": factor, "mscale": all, "mscale_all_dim": all,
            "original_max_position_embeddings": 4096,
        }));
        assert!((scaled / plain / square - 1.0).abs() < 1e-6, "{scaled} of {plain}");
        assert_eq!(embedding.scale, 1.0, "mscale and mscale_all_dim cancel");
    }
    let (scaled, embedding) = latent(json!({"type": "yarn", "factor": 40.0}));
    assert_eq!(scaled, plain, "without mscale_all_dim");
    assert!(embedding.scale > 1.3);
}
