//! Requests as clients send them.

use serde_json::{Value, json};

use crate::program::demo_model;

/// Token ids below this are ordinary ones of the demo model.
const VOCAB: u64 = 1700;

/// A request for `/v1/chat/completions` or `/v1/completions`; greedy unless [`Request::sampled`].
#[derive(Clone, Debug)]
pub struct Request {
    pub(crate) path: &'static str,
    pub(crate) body: Value,
}

impl Request {
    /// The demo's first request: six documents, where Lukas Ebner lives.
    pub fn first() -> Request {
        Request::file("first.json")
    }

    /// The demo's second request: the same documents in another order behind another system text.
    pub fn second() -> Request {
        Request::file("second.json")
    }

    fn file(name: &str) -> Request {
        let text = std::fs::read_to_string(demo_model().join("requests").join(name)).expect("the demo's requests");
        Request { path: "/v1/chat/completions", body: serde_json::from_str(&text).expect("JSON") }
    }

    /// Segments and a query as token ids, for an answer of exactly `max_tokens`.
    pub fn of_tokens(segments: &[Vec<u32>], query: &[u32], max_tokens: u32) -> Request {
        let body = json!({
            "prompt": query, "hypic": {"segments": segments}, "max_tokens": max_tokens, "temperature": 0,
            "ignore_eos": true,
        });
        Request { path: "/v1/completions", body }
    }

    /// Segments of the given lengths and a query of 5 tokens, all drawn from `seed`.
    pub fn random(seed: u64, segments: &[usize], max_tokens: u32) -> Request {
        let drawn: Vec<_> = segments.iter().enumerate().map(|(i, n)| tokens(seed * 1000 + i as u64, *n)).collect();
        Request::of_tokens(&drawn, &tokens(seed * 1000 + 999, 5), max_tokens)
    }

    /// The same with a field of the body set.
    #[must_use]
    pub fn with(mut self, field: &str, value: Value) -> Request {
        self.body[field] = value;
        self
    }

    /// The same, sampled from `seed`.
    #[must_use]
    pub fn sampled(self, seed: u64) -> Request {
        self.with("temperature", json!(1.0)).with("seed", json!(seed))
    }

    /// The same with an answer of exactly `n` tokens.
    #[must_use]
    pub fn long(self, n: u32) -> Request {
        self.with("max_tokens", json!(n)).with("ignore_eos", json!(true))
    }
}

/// Token ids drawn from `seed`.
pub fn tokens(seed: u64, n: usize) -> Vec<u32> {
    // splitmix64: any 64-bit mixer does.
    let mix = |i: u64| {
        let mut z = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(i.wrapping_mul(0xBF58_476D_1CE4_E5B9));
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    };
    (1..=n as u64).map(|i| 10 + u32::try_from(mix(i) % (VOCAB - 10)).expect("a small number")).collect()
}
