//! The reference checkpoints, and what their numbers do not say of themselves.

/// A reference checkpoint below `golden/`.
pub struct Reference {
    /// Name of its folder and files.
    pub name: &'static str,
    /// How its full-attention layers rotate keys: dimensions and base; `None`: not at all.
    pub rotary: Option<(usize, f64)>,
    /// Whether it has experts. In float32 a random prompt can then meet a router tie.
    pub experts: bool,
    /// Whether recurrent states are stored `[heads, d_v, d_k]`.
    pub transposed: bool,
    /// Whether there are compositions of it.
    pub composed: bool,
}

const fn plain(name: &'static str, dimensions: usize, base: f64) -> Reference {
    Reference { name, rotary: Some((dimensions, base)), experts: false, transposed: false, composed: true }
}

const fn experts(name: &'static str, dimensions: usize, base: f64) -> Reference {
    Reference { experts: true, ..plain(name, dimensions, base) }
}

/// All of them.
pub const CHECKPOINTS: [Reference; 17] = [
    plain("qwen3_5", 8, 1e7),
    plain("qwen3_5_vlm", 8, 1e7),
    experts("qwen3_5_moe", 8, 1e7),
    experts("qwen3_5_moe_vlm", 8, 1e7),
    experts("qwen3_next", 8, 1e7),
    experts("bailing_moe_linear", 8, 6e5),
    Reference { rotary: None, ..experts("kimi_linear", 0, 0.0) },
    experts("minimax", 16, 1e7),
    experts("minimax_m1", 8, 1e7),
    experts("bailing_hybrid", 8, 6e6),
    experts("bailing_moe_v2_5", 8, 6e5),
    plain("olmo_hybrid", 16, 1e4),
    Reference { transposed: true, ..plain("bamba", 8, 1e4) },
    Reference { transposed: true, composed: false, ..experts("granitemoehybrid", 16, 1e4) },
    Reference { transposed: true, composed: false, rotary: None, ..plain("nemotron_h", 0, 0.0) },
    Reference { transposed: true, composed: false, rotary: None, ..experts("nemotron_h_moe", 0, 0.0) },
    Reference { transposed: true, composed: false, rotary: None, ..experts("nemotron_h_latent_moe", 0, 0.0) },
];

/// The checkpoint of this name.
pub fn named(name: &str) -> &'static Reference {
    CHECKPOINTS.iter().find(|c| c.name == name).unwrap_or_else(|| panic!("no reference checkpoint {name}"))
}

impl Reference {
    /// Its folder, below this crate's.
    pub fn folder(&self) -> String {
        format!("golden/{}", self.name)
    }
}

/// One test per reference checkpoint, all of one check; or only of those with compositions.
#[macro_export]
macro_rules! for_each_checkpoint {
    ($check:path) => {
        $crate::for_each_checkpoint!(
            $check,
            composed,
            granitemoehybrid,
            nemotron_h,
            nemotron_h_moe,
            nemotron_h_latent_moe
        );
    };
    ($check:path, composed $(, $other:ident)*) => {
        $crate::for_each_checkpoint!(
            @ $check: qwen3_5, qwen3_5_vlm, qwen3_5_moe, qwen3_5_moe_vlm, qwen3_next, bailing_moe_linear, kimi_linear,
            minimax, minimax_m1, bailing_hybrid, bailing_moe_v2_5, olmo_hybrid, bamba $(, $other)*
        );
    };
    (@ $check:path: $($name:ident),*) => {
        $(
            #[test]
            fn $name() {
                $check($crate::checkpoints::named(stringify!($name)));
            }
        )*

        #[test]
        fn every_checkpoint_is_tested() {
            let tested = [$(stringify!($name)),*];
            let missing = |c: &&$crate::checkpoints::Reference| c.composed && !tested.contains(&c.name);
            assert_eq!($crate::checkpoints::CHECKPOINTS.iter().find(missing).map(|c| c.name), None);
        }
    };
}
