//! MLPs and experts: where their weights are, and how experts are chosen.

use hypic_kernels::{Activation, MlpForm, RouteSpec, Score};

use super::layout::named;
use super::read::{divides, factor, only, size, spelling};
use super::trunk::{Module, Trunk};
use crate::config::MAX_SIZE;
use crate::spec::{ExpertsSpec, FeedSpec, MlpSpec, RowSource};
use crate::{Config, ModelError};

/// Most experts in all layers together: far above any model, and few enough to describe each.
const MAX_EXPERTS: usize = 1 << 17;

/// The projections of an MLP by their names, and what stands between them.
#[derive(Clone, Copy)]
pub struct Projections {
    /// Those that share their input: gate and up, or up alone.
    input: &'static [&'static str],
    down: &'static str,
    /// What stands between them.
    pub form: MlpForm,
}

/// SwiGLU by the names that most families use.
pub const PROJ: Projections =
    Projections { input: &["gate_proj", "up_proj"], down: "down_proj", form: MlpForm::SwiGlu };

/// The same by Mixtral's names.
pub const NUMBERED: Projections = Projections { input: &["w1", "w3"], down: "w2", form: MlpForm::SwiGlu };

/// A squared relu without a gate.
pub const SQUARED_RELU: Projections =
    Projections { input: &["up_proj"], down: "down_proj", form: MlpForm::Plain(Activation::SquaredRelu) };

impl Projections {
    /// The same SwiGLU of factors that are bounded, if there is a limit.
    pub fn bounded(self, limit: Option<f32>) -> Self {
        Projections { form: limit.map_or(self.form, |limit| MlpForm::BoundedSwiGlu { limit }), ..self }
    }
}

/// Keys for the number of experts.
const EXPERTS: [&str; 3] = ["num_experts", "num_local_experts", "n_routed_experts"];

/// Keys for the number of experts of a row.
const TOP: [&str; 2] = ["num_experts_per_tok", "num_experts_per_token"];

/// Keys for the number of groups of experts.
pub const GROUPS: [&str; 2] = ["n_group", "num_expert_group"];

/// An MLP.
pub fn mlp(at: &Module, of: Projections, hidden: usize, inner: usize) -> MlpSpec {
    let gate_up = of.input.iter().map(|name| at.rows(name, inner)).collect();
    MlpSpec { inner, form: of.form, gate_up, down: at.rows(of.down, hidden) }
}

/// One MLP for all rows.
///
/// # Errors
/// If `intermediate_size` is missing or wrong.
pub fn dense(trunk: &Trunk<'_>, at: &Module) -> Result<FeedSpec, ModelError> {
    Ok(FeedSpec::Dense(mlp(at, PROJ, trunk.hidden, trunk.c.size("intermediate_size")?)))
}

/// Experts `experts.0`, `experts.1` and so on, each with tensors of its own.
pub fn one_by_one(at: &Module, of: Projections, hidden: usize, inner: usize, experts: usize) -> Vec<MlpSpec> {
    let at = at.sub("experts");
    (0..experts).map(|e| mlp(&at.sub(e), of, hidden, inner)).collect()
}

/// Names of the tensors of fused experts, as transformers has them.
pub const FUSED: [&str; 2] = ["experts.gate_up_proj", "experts.down_proj"];

/// The same of experts without a gate.
pub const FUSED_UNGATED: [&str; 2] = ["experts.up_proj", "experts.down_proj"];

/// Experts in two tensors, `[experts, 2 inner, hidden]` (an expert's gate first; without a gate `inner` rows) and
/// `[experts, hidden, inner]`.
pub fn fused(
    at: &Module,
    [gate_up, down]: [&str; 2],
    form: MlpForm,
    hidden: usize,
    inner: usize,
    experts: usize,
) -> Vec<MlpSpec> {
    let part = |name: &str, e: usize, rows: usize| RowSource {
        name: at.tensor(name),
        blocks: 1,
        block_rows: experts * rows,
        skip: e * rows,
        take: rows,
    };
    let gate_up = |e| vec![part(gate_up, e, form.rows(inner))];
    let expert = |e| MlpSpec { inner, form, gate_up: gate_up(e), down: part(down, e, hidden) };
    (0..experts).map(expert).collect()
}

/// A softmax over all experts, the best of which are chosen.
///
/// # Errors
/// If a key is missing or wrong.
pub fn softmax(trunk: &Trunk<'_>, renormalise: bool) -> Result<RouteSpec, ModelError> {
    let (experts, top_k) = counts(trunk)?;
    Ok(RouteSpec {
        experts,
        top_k,
        score: Score::Softmax,
        groups: 1,
        top_groups: 1,
        renormalise,
        renormalise_eps: 0.0,
        scale: 1.0,
    })
}

/// Experts of a sigmoid router (DeepSeek-V3, 2024) in the module `at`: they are chosen within the best groups by score
/// plus bias, weighed by their scores, and joined by shared experts, which are one MLP that serves every row. They work on
/// rows of `width` columns.
///
/// # Errors
/// If a key is missing, wrong or asks for something that is not served.
pub fn sigmoid_experts(
    trunk: &Trunk<'_>,
    at: &Module,
    places: &SigmoidExperts,
    width: usize,
) -> Result<ExpertsSpec, ModelError> {
    let c = &trunk.c;
    only(c, &["score_function", "scoring_func", "moe_router_activation_func"], "sigmoid")?;
    only(c, &["topk_method"], "noaux_tc")?;
    let route = sigmoid(trunk)?;
    let (hidden, inner) = (trunk.hidden, c.size("moe_intermediate_size")?);
    let shared = shared_width(c, inner, places.default_shared)?;
    let experts = one_by_one(at, places.experts, width, inner, route.experts);
    Ok(ExpertsSpec {
        bias: places.bias.map(|name| at.tensor(name)),
        shared: shared.map(|inner| mlp(&at.sub("shared_experts"), places.shared, hidden, inner)),
        ..ExpertsSpec::new(route, at.rows("gate", route.experts), experts)
    })
}

/// Where the experts of a sigmoid router are, and of which form.
pub struct SigmoidExperts {
    /// Their module in a layer.
    pub module: &'static str,
    /// An expert's projections.
    pub experts: Projections,
    /// The shared experts' projections.
    pub shared: Projections,
    /// The router's bias, in their module; `None`: it has none.
    pub bias: Option<&'static str>,
    /// How many shared experts there are if no key says.
    pub default_shared: usize,
}

/// What follows the mixer of the layer `at`: experts if it is `sparse`, else one MLP in `mlp`.
///
/// # Errors
/// If a key is missing, wrong or asks for something that is not served.
pub fn feed(trunk: &Trunk<'_>, at: &Module, sparse: bool, experts: &SigmoidExperts) -> Result<FeedSpec, ModelError> {
    match sparse {
        true => Ok(sigmoid_experts(trunk, &at.sub(experts.module), experts, trunk.hidden)?.into()),
        false => dense(trunk, &at.sub("mlp")),
    }
}

/// Width of the shared experts together, if there are any.
fn shared_width(c: &Config, inner: usize, default: usize) -> Result<Option<usize>, ModelError> {
    let key = spelling(c, &["num_shared_experts", "n_shared_experts"])?;
    let count = c.opt_usize(key)?.unwrap_or(default);
    let width = c.opt_size("moe_shared_expert_intermediate_size")?.unwrap_or(inner);
    match count.checked_mul(width) {
        Some(0) => Ok(None),
        Some(together) if together <= MAX_SIZE => Ok(Some(together)),
        _ => Err(c.wrong(key, format!("{count} shared experts of {width} are wider than {MAX_SIZE}"))),
    }
}

/// The router. A row's weights are renormalised even if it has one expert, whose weight then is 1, as in the references.
fn sigmoid(trunk: &Trunk<'_>) -> Result<RouteSpec, ModelError> {
    const TOP_GROUPS: &str = "topk_group";
    const GROUPED: &str = "use_grouped_topk";
    let c = &trunk.c;
    let (experts, top_k) = counts(trunk)?;
    let groups_key = spelling(c, &GROUPS)?;
    let (groups, top_groups) = match (c.opt_size(groups_key)?, c.opt_size(TOP_GROUPS)?) {
        (Some(groups), Some(top_groups)) => (groups, top_groups),
        (None | Some(1), None | Some(1)) => (1, 1),
        (Some(_), None) => return Err(c.wrong(TOP_GROUPS, format!("is missing, though there is {groups_key}"))),
        (None, Some(_)) => {
            let problem = format!("is missing (names of it: {}), though there is {TOP_GROUPS}", GROUPS.join(", "));
            return Err(c.wrong(groups_key, problem));
        }
    };
    let experts_key = spelling(c, &EXPERTS)?;
    divides(c, (experts_key, experts), (groups_key, groups))?;
    if top_groups > groups {
        return Err(c.wrong(TOP_GROUPS, format!("is {top_groups}, of {groups_key} = {groups}")));
    }
    let of_group = experts / groups;
    if top_groups < groups && of_group < 2 {
        return Err(
            c.wrong(groups_key, format!("leaves {of_group} expert a group; groups are judged by their two best"))
        );
    }
    if top_k > top_groups * of_group {
        let problem = format!("leaves {} experts for the {top_k} of a row", top_groups * of_group);
        return Err(c.wrong(TOP_GROUPS, problem));
    }
    if !c.opt_bool(GROUPED)?.unwrap_or(true) && groups > 1 {
        return Err(c.unsupported(GROUPED, format_args!("only true is served, or {groups_key} = 1")));
    }
    let renormalise = spelling(c, &["norm_topk_prob", "moe_renormalize"])?;
    Ok(RouteSpec {
        experts,
        top_k,
        score: Score::Sigmoid,
        groups,
        top_groups,
        renormalise: c.opt_bool(renormalise)?.unwrap_or(true),
        renormalise_eps: 1e-20,
        scale: factor(c, "routed_scaling_factor", None)?,
    })
}

/// Experts, and experts of a row.
fn counts(trunk: &Trunk<'_>) -> Result<(usize, usize), ModelError> {
    let c = &trunk.c;
    let ((experts_key, experts), (top_key, top_k)) = (size(c, &EXPERTS)?, size(c, &TOP)?);
    if experts * trunk.layers > MAX_EXPERTS {
        let problem = format!("is {experts}: with num_hidden_layers = {}, more than {MAX_EXPERTS}", trunk.layers);
        return Err(c.wrong(experts_key, problem));
    }
    if top_k > experts {
        return Err(c.wrong(top_key, format!("is {top_k}, of {experts_key} = {experts}")));
    }
    Ok((experts, top_k))
}

/// Which layers have experts: as `mlp_layer_types` says, else those from `first_k_dense_replace` on (every
/// `moe_layer_freq`-th).
///
/// # Errors
/// If both keys are missing, or one is wrong.
pub fn sparse_layers(trunk: &Trunk<'_>) -> Result<Vec<bool>, ModelError> {
    const FIRST: &str = "first_k_dense_replace";
    const TYPES: &str = "mlp_layer_types";
    let (c, layers) = (&trunk.c, trunk.layers);
    let every = c.opt_size("moe_layer_freq")?.unwrap_or(1);
    let from = |first| (0..layers).map(|l| l >= first && l.is_multiple_of(every)).collect::<Vec<bool>>();
    // The list tells more: transformers saves the number beside it whatever it is.
    let ruled = c.opt_usize(FIRST)?.map(from);
    let sparse = named(c, TYPES, layers, &["dense"], &["sparse"])?.or(ruled);
    sparse.ok_or_else(|| c.wrong(FIRST, format!("is missing, and so is {TYPES}")))
}

/// Limits of the factors of SwiGLU, per layer: of experts, and of shared experts.
pub const LIMITS: [&str; 2] = ["expert_swiglu_limit_list", "share_expert_swiglu_limit_list"];

/// The list `key` of [`LIMITS`]; null and 0 are none.
///
/// # Errors
/// If it has not a number, 0 or more, for every layer.
pub fn limits(c: &Config, key: &str, layers: usize) -> Result<Vec<Option<f32>>, ModelError> {
    let Some(value) = c.get(key) else { return Ok(vec![None; layers]) };
    let listed = value.as_array().ok_or_else(|| c.wrong(key, "must be a list"))?;
    if listed.len() < layers {
        return Err(c.wrong(key, format!("has {} entries, for {layers} layers", listed.len())));
    }
    let limit = |value: &serde_json::Value| match value.as_f64() {
        _ if value.is_null() => Ok(None),
        Some(limit) if limit >= 0.0 => Ok(Some(limit as f32).filter(|limit| *limit > 0.0)),
        _ => Err(c.wrong(key, format!("must have numbers, 0 or more, has {value}"))),
    };
    listed[..layers].iter().map(limit).collect()
}
