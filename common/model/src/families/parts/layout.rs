//! Which layers are of which kind, from each form of list that releases use. A list that is taken for another form
//! gives a model whose weights do not fit, or worse, one whose weights do.

use super::read::{opt_usizes, spelling};
use crate::{Config, ModelError};

/// `key`, a name for every layer: whether it is one of `yes`; another must be one of `no`.
///
/// # Errors
/// If the list is of another length or has another name.
pub fn named(c: &Config, key: &str, layers: usize, no: &[&str], yes: &[&str]) -> Result<Option<Vec<bool>>, ModelError> {
    let Some(names) = c.opt_strings(key)? else { return Ok(None) };
    one_per_layer(c, key, names.len(), layers)?;
    let kind = |(layer, name): (usize, &String)| match name.as_str() {
        name if yes.contains(&name) => Ok(true),
        name if no.contains(&name) => Ok(false),
        other => {
            let served = [no, yes].concat().join(" and ");
            let key = c.name(key);
            Err(ModelError::Unsupported(format!("{key}[{layer}] = {other:?} in config.json ({served} are served)")))
        }
    };
    names.iter().enumerate().map(kind).collect::<Result<_, _>>().map(Some)
}

/// `layer_types` as transformers writes it: which layers are full attention.
///
/// # Errors
/// As [`named`].
pub fn layer_types(c: &Config, layers: usize) -> Result<Option<Vec<bool>>, ModelError> {
    named(c, "layer_types", layers, &["linear_attention"], &["full_attention"])
}

/// Words for a Mamba2 layer in lists of Mamba2 stacks, as releases and as transformers write them.
pub const MAMBA: [&str; 2] = ["mamba", "linear_attention"];

/// Words for attention in the same lists.
pub const ATTENTION: [&str; 2] = ["attention", "full_attention"];

/// `layer_types` of a Mamba2 stack, or `layers_block_type`: that name, and which layers are full attention.
///
/// # Errors
/// As [`named`]; or if both are there and differ.
pub fn mamba_types(c: &Config, layers: usize) -> Result<(&'static str, Option<Vec<bool>>), ModelError> {
    let key = spelling(c, &["layer_types", "layers_block_type"])?;
    Ok((key, named(c, key, layers, &MAMBA, &ATTENTION)?))
}

/// `layer_types`, else `ruled`, which follows from the rule at `key`. Where both are and differ the list counts, as in
/// the references, and the difference is told.
///
/// # Errors
/// As [`named`].
pub fn listed_or_ruled(
    c: &Config,
    layers: usize,
    (key, ruled): (&str, Option<Vec<bool>>),
) -> Result<Option<Vec<bool>>, ModelError> {
    let Some(listed) = layer_types(c, layers)? else { return Ok(ruled) };
    let differs = ruled.and_then(|ruled| listed.iter().zip(&ruled).position(|(a, b)| a != b));
    if let Some(layer) = differs {
        let (used_from, ignored_from) = (c.name("layer_types"), c.name(key));
        tracing::warn!(layer, used_from, ignored_from, "two layouts of the layers");
    }
    Ok(Some(listed))
}

/// The last of every `interval` layers.
pub fn every(interval: usize, layers: usize) -> Vec<bool> {
    (1..=layers).map(|l| l.is_multiple_of(interval)).collect()
}

/// `key`, 0 or 1 for every layer.
///
/// # Errors
/// If the list is of another length or has another number.
pub fn flags(c: &Config, key: &str, layers: usize) -> Result<Option<Vec<bool>>, ModelError> {
    let Some(flags) = opt_usizes(c, key)? else { return Ok(None) };
    one_per_layer(c, key, flags.len(), layers)?;
    let flag = |(layer, &flag): (usize, &usize)| match flag {
        0 | 1 => Ok(flag == 1),
        other => {
            let key = c.name(key);
            Err(ModelError::Unsupported(format!("{key}[{layer}] = {other} in config.json (0 and 1 are served)")))
        }
    };
    flags.iter().enumerate().map(flag).collect::<Result<_, _>>().map(Some)
}

/// `key`, the numbers of some layers, the first layer being number `first`: which layers those are.
///
/// # Errors
/// If there is no layer of a number.
pub fn numbers(c: &Config, key: &str, first: usize, layers: usize) -> Result<Option<Vec<bool>>, ModelError> {
    let Some(numbers) = opt_usizes(c, key)? else { return Ok(None) };
    let mut listed = vec![false; layers];
    for number in numbers {
        let layer = number.checked_sub(first).and_then(|l| listed.get_mut(l));
        *layer.ok_or_else(|| {
            c.wrong(key, format!("has {number}, but layers are numbered {first} to {}", layers + first - 1))
        })? = true;
    }
    Ok(Some(listed))
}

/// Of two lists that say the same, the one that is there.
///
/// # Errors
/// If both are and differ, or neither is.
pub fn either(
    c: &Config,
    (key, list): (&str, Option<Vec<bool>>),
    (other_key, other): (&str, Option<Vec<bool>>),
) -> Result<Vec<bool>, ModelError> {
    match (list, other) {
        (Some(list), Some(other)) => match list.iter().zip(&other).position(|(a, b)| a != b) {
            Some(layer) => Err(c.wrong(key, format!("differs from {} in layer {layer}", c.name(other_key)))),
            None => Ok(list),
        },
        (Some(list), None) | (None, Some(list)) => Ok(list),
        (None, None) => Err(c.wrong(key, format!("is missing, and so is {}", c.name(other_key)))),
    }
}

fn one_per_layer(c: &Config, key: &str, entries: usize, layers: usize) -> Result<(), ModelError> {
    if entries != layers {
        return Err(c.wrong(key, format!("has {entries} entries, num_hidden_layers is {layers}")));
    }
    Ok(())
}
