//! The rotary embedding of a configuration, from each place where releases put its parameters.
//!
//! A parameter that is read from the wrong place, or not found and taken for its default, gives a model that
//! answers fluently and wrongly. So every place is searched, in one order, and a value that another one
//! overrules is told; two types, or two widths, that contradict each other are refused. So is what is not served, by
//! the name of its key.
//!
//! The formulas are those that transformers documents for its rope types: linear interpolation of positions (Chen et
//! al., 2023), YaRN (Peng et al., 2023), the smoothed interpolation of Llama 3.1 (Meta, 2024), and dynamic NTK scaling,
//! which up to the original maximum is the plain embedding and beyond it depends on the length ([`DynamicNtk`]).

use std::f64::consts::{PI, TAU};

use hypic_kernels::RopeSpec;

use crate::spec::DynamicNtk;
use crate::{Config, ModelError};

/// What a family takes for parameters that the configuration does not name.
pub(super) struct RopeDefaults {
    pub theta: f64,
    /// Share of a head that is rotated.
    pub partial: f64,
}

/// The rotary embedding for heads of `head_dim`. Of the text model's configuration first, then of the one that
/// holds it: `rope_parameters.full_attention`, `rope_parameters`, `rope_scaling`, the configuration itself. The
/// first place that names a parameter counts (but for `original_max_position_embeddings`, where the configuration itself
/// comes first).
///
/// # Errors
/// If a parameter is wrong or missing, or the type is one that is not served.
pub(super) fn rope(config: &Config, head_dim: usize, defaults: &RopeDefaults) -> Result<RopeSpec, ModelError> {
    let places = Places::of(config)?;
    let rotated = places.rotated(config, head_dim, defaults.partial)?;
    places.embedding(rotated, defaults.theta)
}

/// As [`rope`], where attention does not rotate unless some place names a theta. The type `default` alone does not ask
/// for rotation: that is what transformers writes for a model without. Another type does, and then lacks its theta.
///
/// # Errors
/// As [`rope`]; or if a scaling is named and no theta.
pub(super) fn rope_if_theta(
    config: &Config,
    head_dim: usize,
    defaults: &RopeDefaults,
) -> Result<Option<RopeSpec>, ModelError> {
    let places = Places::of(config)?;
    if places.everywhere().any(|place| place.get(THETA).is_some()) {
        return rope(config, head_dim, defaults).map(Some);
    }
    match places.kind {
        Kind::Plain => Ok(None),
        _ => Err(places.wrong(THETA, "is missing, though a scaling is named")),
    }
}

/// The rotary embedding of all `dims` dimensions, whatever share of a head the configuration names: the rotary part of
/// MLA, which has a width of its own. `theta` as in [`RopeDefaults`].
///
/// # Errors
/// As [`rope`].
pub(super) fn rope_whole(config: &Config, dims: usize, theta: f64) -> Result<RopeSpec, ModelError> {
    if !dims.is_multiple_of(2) {
        return Err(config.wrong("qk_rope_head_dim", format!("is {dims}; rotation needs pairs")));
    }
    Places::of(config)?.embedding(dims, theta)
}

/// The factor on the softmax scale of MLA: the square of YaRN's `0.1 mscale_all_dim ln(factor) + 1` (DeepSeek-V2,
/// 2024), since there the embedding itself scales the rotary part alone. 1 without YaRN or `mscale_all_dim`.
///
/// # Errors
/// As [`rope`].
pub(super) fn softmax_factor(config: &Config) -> Result<f64, ModelError> {
    let places = Places::of(config)?;
    if places.kind != Kind::Yarn {
        return Ok(1.0);
    }
    let (factor, _) = places.extension()?;
    let weight = places.scaling("mscale_all_dim", |n| n >= 0.0, "must be 0 or more")?.unwrap_or(0.0);
    Ok(magnitude(factor, weight).powi(2))
}

/// Dynamic NTK scaling, if the type is that one, and the positions that the model serves: linear and dynamic scaling take
/// it `factor` times as far as `max_positions`, YaRN `factor` times as far as the original maximum, if that is farther; the
/// other types have it named already.
///
/// With dynamic scaling nothing is stretched up to `max_positions`, in transformers. A smaller original maximum, which it
/// does not look at, ends what is used again all the same: who names one may mean it.
///
/// # Errors
/// As [`rope`].
pub(super) fn reach(config: &Config, max_positions: usize) -> Result<(Option<DynamicNtk>, usize), ModelError> {
    let places = Places::of(config)?;
    let times = |factor: f64, positions: f64| ((factor * positions) as usize).min(u32::MAX as usize);
    Ok(match places.kind {
        Kind::Plain | Kind::Llama3 => (None, max_positions),
        Kind::Linear => (None, times(places.required("factor", places.factor()?)?, max_positions as f64)),
        Kind::Yarn => {
            let (factor, original) = places.extension()?;
            (None, max_positions.max(times(factor, original)))
        }
        Kind::Dynamic => {
            let factor = places.required("factor", places.factor()?)?;
            let reusable = places.original()?.map_or(max_positions, |n| max_positions.min(n as usize));
            (Some(DynamicNtk { original: max_positions, reusable, factor }), times(factor, max_positions as f64))
        }
    })
}

/// Types of scaling that are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// No scaling; for text, mrope is the same.
    Plain,
    /// Positions are divided by a factor.
    Linear,
    /// Plain up to the original maximum, beyond which the base depends on the length.
    Dynamic,
    Yarn,
    Llama3,
}

/// Where a configuration may name parameters.
struct Places {
    /// The one that counts most first.
    all: Vec<Place>,
    kind: Kind,
    /// The place that names the type, for messages.
    named_by: Option<Config>,
}

struct Place {
    config: Config,
    /// An object for the rotary embedding, not a whole configuration.
    of_rope: bool,
}

impl Places {
    fn of(config: &Config) -> Result<Self, ModelError> {
        let mut all = Vec::new();
        for level in [config.object("text_config")?, Some(config.clone())].into_iter().flatten() {
            let parameters = level.object("rope_parameters")?;
            let per_type = parameters.as_ref().map(|p| p.object("full_attention")).transpose()?.flatten();
            let objects = [per_type, parameters, level.object("rope_scaling")?].into_iter().flatten();
            all.extend(objects.map(|config| Place { config, of_rope: true }));
            all.push(Place { config: level, of_rope: false });
        }
        let rope = || all.iter().filter(|p| p.of_rope).map(|p| &p.config);
        let mut found: Option<(&Config, &str, Kind)> = None;
        for place in rope() {
            for key in ["rope_type", "type"] {
                let Some(kind) = kind(place, key)? else { continue };
                match found {
                    None => found = Some((place, key, kind)),
                    Some((first, its_key, known)) if known != kind => {
                        let problem = format!("but {} names another type", first.name(its_key));
                        return Err(place.unsupported(key, problem));
                    }
                    Some(_) => {}
                }
            }
        }
        if found.is_none()
            && let Some(place) = rope().find(|p| p.get("factor").is_some())
        {
            return Err(place.wrong("rope_type", "is missing, though there is a factor"));
        }
        let named_by = found.map(|(place, ..)| place.clone());
        let kind = found.map_or(Kind::Plain, |(.., kind)| kind);
        for key in ["mscale", "mscale_all_dim"] {
            if let Some(place) = rope().find(|p| kind != Kind::Yarn && p.get(key).is_some()) {
                return Err(place.unsupported(key, "served with yarn alone"));
            }
        }
        Ok(Places { all, kind, named_by })
    }

    fn everywhere(&self) -> impl Iterator<Item = &Config> {
        self.all.iter().map(|p| &p.config)
    }

    fn of_rope(&self) -> impl Iterator<Item = &Config> {
        self.all.iter().filter(|p| p.of_rope).map(|p| &p.config)
    }

    /// The embedding of `rotated` dimensions.
    fn embedding(&self, rotated: usize, default_theta: f64) -> Result<RopeSpec, ModelError> {
        let theta = self.number(THETA, |n| n > 0.0, "must be above 0")?.unwrap_or(default_theta);
        let plain: Vec<f64> = (0..rotated / 2).map(|i| theta.powf(-2.0 * i as f64 / rotated as f64)).collect();
        let (inv_freq, scale) = match self.kind {
            // The factor of dynamic scaling counts beyond the original maximum alone.
            Kind::Plain | Kind::Dynamic => (plain, 1.0),
            Kind::Linear => {
                let factor = self.required("factor", self.factor()?)?;
                (plain.into_iter().map(|f| f / factor).collect(), 1.0)
            }
            Kind::Yarn => self.yarn(&plain, theta)?,
            Kind::Llama3 => (self.llama3(plain)?, 1.0),
        };
        Ok(RopeSpec { offset: 0, inv_freq, interleaved: false, scale })
    }

    /// YaRN (Peng et al., 2023, section 3.2): frequencies that turn more than `beta_fast` times within the original
    /// length stay, those that turn less than `beta_slow` times are interpolated, with a linear ramp over the indices
    /// between; cosine and sine are scaled by the attention factor.
    fn yarn(&self, plain: &[f64], theta: f64) -> Result<(Vec<f64>, f64), ModelError> {
        let (factor, original) = self.extension()?;
        let positive = |key: &str| self.scaling(key, |n| n > 0.0, "must be above 0");
        let weight = |key: &str| self.scaling(key, |n| n >= 0.0, "must be 0 or more");
        let (fast, slow) = (positive("beta_fast")?.unwrap_or(32.0), positive("beta_slow")?.unwrap_or(1.0));
        if fast < slow {
            return Err(self.wrong("beta_fast", format!("is {fast}, less than beta_slow = {slow}")));
        }
        for place in self.of_rope() {
            for key in ["attn_factor", "extrapolation_factor"] {
                if place.opt_f64(key)?.is_some_and(|n| n != 1.0) {
                    return Err(place.unsupported(key, "only 1 is served"));
                }
            }
        }
        if theta <= 1.0 {
            return Err(self.wrong(THETA, format!("must be above 1 for yarn, is {theta}")));
        }
        let mut truncate = None;
        for place in self.of_rope() {
            truncate = truncate.or(place.opt_bool("truncate")?);
        }
        let dims = 2.0 * plain.len() as f64;
        // The index of the frequency that turns `turns` times within the original length.
        let index_of = |turns: f64| dims * (original / (turns * TAU)).ln() / (2.0 * theta.ln());
        let (mut low, mut high) = (index_of(fast), index_of(slow));
        if truncate.unwrap_or(true) {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dims - 1.0));
        if low == high {
            high += 0.001;
        }
        let mixed = plain.iter().enumerate().map(|(i, f)| {
            let interpolated = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            f / factor * interpolated + f * (1.0 - interpolated)
        });
        let scale = match (positive("attention_factor")?, weight("mscale")?, weight("mscale_all_dim")?) {
            (Some(factor), ..) => factor,
            (None, Some(mscale), Some(all)) if mscale > 0.0 && all > 0.0 => {
                magnitude(factor, mscale) / magnitude(factor, all)
            }
            _ => magnitude(factor, 1.0),
        };
        Ok((mixed.collect(), scale))
    }

    /// Llama 3.1: wave lengths over `original / low_freq_factor` are stretched by the factor, those under
    /// `original / high_freq_factor` stay, those between are mixed.
    fn llama3(&self, plain: Vec<f64>) -> Result<Vec<f64>, ModelError> {
        let required = |key: &str| self.required(key, self.scaling(key, |n| n > 0.0, "must be above 0")?);
        let factor = self.required("factor", self.factor()?)?;
        let (low, high) = (required("low_freq_factor")?, required("high_freq_factor")?);
        if high <= low {
            return Err(self.wrong("high_freq_factor", format!("is {high}, not above low_freq_factor = {low}")));
        }
        let original = self.required(ORIGINAL, self.original()?.or(self.longest()?))?;
        let scaled = plain.into_iter().map(|f| {
            let length = 2.0 * PI / f;
            if length < original / high {
                f
            } else if length > original / low {
                f / factor
            } else {
                let keep = (original / length - low) / (high - low);
                (1.0 - keep) * f / factor + keep * f
            }
        });
        Ok(scaled.collect())
    }

    /// Dimensions of a head that are rotated: `partial_rotary_factor` and `rotary_pct` are a share of it, `rotary_dim`
    /// (MiniMax) and `attn_rotary_emb` (Bamba) count them.
    fn rotated(&self, config: &Config, head_dim: usize, default: f64) -> Result<usize, ModelError> {
        const SHARES: [&str; 2] = ["partial_rotary_factor", "rotary_pct"];
        const COUNTS: [&str; 2] = ["rotary_dim", "attn_rotary_emb"];
        // The tolerance is for factors such as 1/3: a product just below a whole number means that number.
        let of_head = |share: f64| (head_dim as f64 * share + 1e-9) as usize;
        let share = |key| self.number(key, |n| (0.0..=1.0).contains(&n), "must be from 0 to 1");
        let whole = |n: f64| n.fract() == 0.0 && (0.0..=head_dim as f64).contains(&n);
        let what = format!("must be a whole number up to the {head_dim} dimensions of a head");
        let mut named = Vec::new();
        for key in SHARES {
            named.extend(share(key)?.map(|share| (key, of_head(share))));
        }
        for key in COUNTS {
            named.extend(self.number(key, whole, &what)?.map(|count| (key, count as usize)));
        }
        let (key, rotated) = named.first().copied().unwrap_or(("head_dim", of_head(default)));
        if let Some((other, count)) = named.iter().find(|(_, count)| *count != rotated) {
            let problem = format!("makes it {count}, but {key} makes it {rotated} of {head_dim} dimensions");
            return Err(config.wrong(other, problem));
        }
        if !rotated.is_multiple_of(2) {
            let problem = format!("makes {rotated} of the {head_dim} dimensions of a head; rotation needs pairs");
            return Err(config.wrong(key, problem));
        }
        Ok(rotated)
    }

    /// By how much YaRN extends the original length, and that length. A missing factor is the ratio of the lengths, a
    /// missing original length is the maximum.
    fn extension(&self) -> Result<(f64, f64), ModelError> {
        let (factor, original, longest) = (self.factor()?, self.original()?, self.longest()?);
        match (factor, original.or(longest), longest) {
            (Some(factor), Some(original), _) => Ok((factor, original)),
            (None, Some(_), Some(longest)) if original.is_some_and(|o| o <= longest) => {
                let original = original.expect("just seen");
                Ok((longest / original, original))
            }
            (_, None, _) => Err(self.wrong(ORIGINAL, "is missing")),
            _ => Err(self.wrong("factor", "is missing")),
        }
    }

    fn factor(&self) -> Result<Option<f64>, ModelError> {
        self.scaling("factor", |n| n >= 1.0, "must be 1 or more")
    }

    /// The positions before scaling, in whichever place; a configuration itself counts more than an object in it, as in
    /// transformers.
    fn original(&self) -> Result<Option<f64>, ModelError> {
        let (outside, inside) = (self.all.iter().filter(|p| !p.of_rope), self.of_rope());
        first(outside.map(|p| &p.config).chain(inside), ORIGINAL, |n| n >= 1.0, "must be 1 or more")
    }

    /// The positions that the model is said to serve.
    fn longest(&self) -> Result<Option<f64>, ModelError> {
        for key in ["max_position_embeddings", "model_max_length"] {
            if let Some(n) = self.number(key, |n| n >= 1.0, "must be 1 or more")? {
                return Ok(Some(n));
            }
        }
        Ok(None)
    }

    /// A parameter that may stand in any place.
    fn number(&self, key: &str, valid: impl Fn(f64) -> bool, what: &str) -> Result<Option<f64>, ModelError> {
        first(self.everywhere(), key, valid, what)
    }

    /// A parameter of the scaling, which no other place than an object for the embedding names.
    fn scaling(&self, key: &str, valid: impl Fn(f64) -> bool, what: &str) -> Result<Option<f64>, ModelError> {
        first(self.of_rope(), key, valid, what)
    }

    fn required(&self, key: &str, value: Option<f64>) -> Result<f64, ModelError> {
        value.ok_or_else(|| self.wrong(key, "is missing"))
    }

    /// That a parameter of the scaling is wrong.
    fn wrong(&self, key: &str, problem: impl Into<String>) -> ModelError {
        let place = self.everywhere().find(|p| p.get(key).is_some()).or(self.named_by.as_ref());
        place.or(self.everywhere().last()).expect("there is the configuration itself").wrong(key, problem)
    }
}

const THETA: &str = "rope_theta";

const ORIGINAL: &str = "original_max_position_embeddings";

/// YaRN's `0.1 weight ln(factor) + 1` (Peng et al., 2023, section 3.4).
fn magnitude(factor: f64, weight: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 }
}

/// The type that `place` names at `key`.
fn kind(place: &Config, key: &str) -> Result<Option<Kind>, ModelError> {
    let Some(name) = place.opt_str(key)? else { return Ok(None) };
    match name.as_str() {
        "default" | "mrope" => Ok(Some(Kind::Plain)),
        "linear" => Ok(Some(Kind::Linear)),
        "dynamic" => Ok(Some(Kind::Dynamic)),
        "yarn" => Ok(Some(Kind::Yarn)),
        "llama3" => Ok(Some(Kind::Llama3)),
        _ => Err(place.unsupported(key, "default, linear, dynamic, yarn, llama3 and mrope are served")),
    }
}

/// The first value of `key` in `places`; others that differ are told.
fn first<'a>(
    places: impl Iterator<Item = &'a Config>,
    key: &str,
    valid: impl Fn(f64) -> bool,
    what: &str,
) -> Result<Option<f64>, ModelError> {
    let mut chosen: Option<(&Config, f64)> = None;
    for place in places {
        let Some(value) = place.opt_f64(key)? else { continue };
        if !valid(value) {
            return Err(place.wrong(key, format!("{what}, is {value}")));
        }
        match chosen {
            None => chosen = Some((place, value)),
            Some((by, used)) if used != value => {
                let (used_from, ignored_from) = (by.name(key), place.name(key));
                tracing::warn!(used, used_from, ignored = value, ignored_from, "two values of one rope parameter");
            }
            Some(_) => {}
        }
    }
    Ok(chosen.map(|(_, value)| value))
}
