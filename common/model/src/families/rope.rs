//! The rotary embedding of a configuration, from each place where releases put its parameters.
//!
//! A parameter that is read from the wrong place, or not found and taken for its default, gives a model that
//! answers fluently and wrongly. So every place is searched, in one order, and a value that another one
//! overrules is told.

use hypic_kernels::RopeSpec;

use crate::{Config, ModelError};

/// What a family takes for parameters that the configuration does not name.
pub(super) struct RopeDefaults {
    pub theta: f64,
    /// Share of a head that is rotated.
    pub partial: f64,
}

/// The rotary embedding for heads of `head_dim`. Of the text model's configuration first, then of the one that
/// holds it: `rope_parameters.full_attention`, `rope_parameters`, `rope_scaling`, the configuration itself. The
/// first place that names a parameter counts, as in transformers.
///
/// # Errors
/// If a parameter is wrong, or the type is one that is not served.
pub(super) fn rope(config: &Config, head_dim: usize, defaults: &RopeDefaults) -> Result<RopeSpec, ModelError> {
    let mut places = Vec::new();
    for level in [config.object("text_config")?, Some(config.clone())].into_iter().flatten() {
        let parameters = level.object("rope_parameters")?;
        if let Some(parameters) = &parameters {
            places.extend(parameters.object("full_attention")?);
        }
        places.extend(parameters);
        places.extend(level.object("rope_scaling")?);
        places.push(level);
    }
    for place in &places {
        only_plain(place)?;
    }
    let theta = first(&places, "rope_theta", defaults.theta, |n| n > 0.0, "must be above 0")?;
    let partial =
        first(&places, "partial_rotary_factor", defaults.partial, |n| (0.0..=1.0).contains(&n), "must be from 0 to 1")?;
    // The tolerance is for factors such as 1/3: a product just below a whole number means that number.
    let rotated = (head_dim as f64 * partial + 1e-9) as usize;
    if !rotated.is_multiple_of(2) {
        let problem = format!("{partial} of a head of {head_dim} is {rotated} dimensions; rotation needs pairs");
        return Err(config.wrong("partial_rotary_factor", problem));
    }
    let inv_freq = (0..rotated / 2).map(|i| theta.powf(-2.0 * i as f64 / rotated as f64)).collect();
    Ok(RopeSpec { offset: 0, inv_freq, interleaved: false, scale: 1.0 })
}

/// The first value of `key` in `places`; others that differ are told.
fn first(
    places: &[Config],
    key: &str,
    default: f64,
    valid: impl Fn(f64) -> bool,
    what: &str,
) -> Result<f64, ModelError> {
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
    Ok(chosen.map_or(default, |(_, value)| value))
}

/// Only the unscaled embedding is served; for text, mrope is the same.
fn only_plain(place: &Config) -> Result<(), ModelError> {
    for key in ["rope_type", "type"] {
        let kind = place.opt_str(key)?;
        if kind.is_some_and(|kind| kind != "default" && kind != "mrope") {
            return Err(place.unsupported(key, "only \"default\" and \"mrope\" are served"));
        }
    }
    Ok(())
}
