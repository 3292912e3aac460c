//! The layers of the settings. Each layer is checked by itself before it is laid over the ones below, so that an error
//! names the file, variable or flag that is wrong. A value from the environment or a flag is read as TOML if it can be,
//! else as text, else as a list of texts with commas between them.

use std::ffi::OsString;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use hypic_cluster::Role;
use toml::{Table, Value};

use super::Config;

/// What environment variables begin with that are settings: `HYPIC__SECTION__KEY`. One underscore is not enough,
/// because a Kubernetes Service of the name hypic-router puts `HYPIC_ROUTER_PORT` into every pod.
pub const ENV_PREFIX: &str = "HYPIC__";

/// Settings as they are put together.
#[derive(Debug)]
pub struct Layers {
    role: Role,
    table: Table,
}

impl Layers {
    /// The defaults of a role.
    ///
    /// # Errors
    /// None that depends on input.
    pub fn new(role: Role) -> Result<Self> {
        let table = Table::try_from(Config::of(role)).context("cannot write the defaults")?;
        Ok(Layers { role, table })
    }

    /// Lay a TOML file over them.
    ///
    /// # Errors
    /// If it cannot be read, is no TOML, or has unknown keys or values of the wrong kind.
    pub fn file(&mut self, path: &Path) -> Result<()> {
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        toml::from_str::<Config>(&text).with_context(|| format!("in {}", path.display()))?;
        lay(&mut self.table, text.parse()?);
        Ok(())
    }

    /// Lay the variables that begin with [`ENV_PREFIX`] over them; all others mean nothing.
    ///
    /// # Errors
    /// If one of them is no setting, or its value is of the wrong kind.
    pub fn environment(&mut self, variables: impl IntoIterator<Item = (OsString, OsString)>) -> Result<()> {
        for (name, value) in variables {
            let name = name.to_string_lossy().into_owned();
            let Some(path) = name.strip_prefix(ENV_PREFIX) else {
                continue;
            };
            let from = format!("environment variable {name}");
            let value = value.into_string().map_err(|_| anyhow!("{from}: its value is not UTF-8"))?;
            let path: Vec<String> = path.split("__").map(str::to_lowercase).collect();
            self.set(&from, &path, &value)?;
        }
        Ok(())
    }

    /// Lay one flag over them: `from` is what the user wrote, `key` is `section.key`.
    ///
    /// # Errors
    /// If there is no such setting, or the value is of the wrong kind.
    pub fn flag(&mut self, from: &str, key: &str, value: &str) -> Result<()> {
        let path: Vec<String> = key.split('.').map(str::to_string).collect();
        self.set(from, &path, value)
    }

    /// The settings.
    ///
    /// # Errors
    /// If they contradict each other.
    pub fn finish(self) -> Result<Config> {
        let config: Config = self.table.try_into().context("in the settings put together")?;
        config.check(self.role)?;
        Ok(config)
    }

    fn set(&mut self, from: &str, path: &[String], text: &str) -> Result<()> {
        if path.len() < 2 || path.iter().any(String::is_empty) {
            bail!("{from}: settings are SECTION.KEY, such as router.seam (in the environment HYPIC__ROUTER__SEAM)");
        }
        let list = || text.split(',').map(|item| Value::String(item.trim().to_string())).collect();
        let candidates = [parsed(text), Some(Value::String(text.to_string())), Some(Value::Array(list()))];
        let mut refused = None;
        for value in candidates.into_iter().flatten() {
            let layer = nested(path, value);
            // Over what is there: a section may have keys that it cannot do without.
            let mut whole = self.table.clone();
            lay(&mut whole, layer);
            match whole.clone().try_into::<Config>() {
                Ok(_) => {
                    self.table = whole;
                    return Ok(());
                }
                Err(error) if incomplete(&error) => {
                    self.table = whole;
                    return Ok(());
                }
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        let reason = refused.map(|e| e.to_string()).unwrap_or_default();
        bail!("{from}: {}", reason.trim().replace('\n', ": "))
    }
}

/// A section lacks a key that a later layer may bring; the last check tells if none does.
fn incomplete(error: &toml::de::Error) -> bool {
    error.message().starts_with("missing field")
}

/// The text as a TOML value, if it is one.
fn parsed(text: &str) -> Option<Value> {
    let mut table: Table = format!("value = {text}").parse().ok()?;
    if table.len() == 1 { table.remove("value") } else { None }
}

fn nested(path: &[String], value: Value) -> Table {
    let Some((key, rest)) = path.split_first() else {
        return Table::new();
    };
    let value = if rest.is_empty() { value } else { Value::Table(nested(rest, value)) };
    Table::from_iter([(key.clone(), value)])
}

fn lay(below: &mut Table, above: Table) {
    for (key, value) in above {
        match (below.get_mut(&key), value) {
            (Some(Value::Table(old)), Value::Table(new)) => lay(old, new),
            (_, value) => {
                below.insert(key, value);
            }
        }
    }
}
