//! Rules of the monitor's layers that the compiler doesn't know: which layer uses which, and that no two types share a
//! name.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use syn::visit::{self, Visit};

/// The layers of the monitor, the lowest first: each knows those before it, and itself.
const LAYERS: [&str; 14] = [
    "snapshot",
    "log",
    "state",
    "decide",
    "node",
    "caller",
    "driver",
    "processes",
    "compute",
    "case",
    "uvm",
    "audit",
    "calls",
    "daemon",
];

fn src() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

fn sources(path: &Path) -> Vec<PathBuf> {
    if path.is_file() {
        return vec![path.to_owned()];
    }
    let entries = fs::read_dir(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    entries.flat_map(|entry| sources(&entry.expect("a directory can be read").path())).collect()
}

fn is_tests(file: &Path) -> bool {
    file.file_name().is_some_and(|name| name == "tests.rs")
}

/// A module, by its path below the crate: `["gate", "wire"]`.
type Module = Vec<String>;

/// All files by their modules.
fn modules() -> BTreeMap<Module, PathBuf> {
    let src = src();
    let files = sources(&src).into_iter().filter(|file| !is_tests(file));
    let module = |file: &Path| {
        let below = file.strip_prefix(&src).expect("it is below").with_extension("");
        let mut names: Module =
            below.iter().map(|name| name.to_string_lossy().into_owned()).collect();
        if names.last().is_some_and(|name| ["mod", "lib"].contains(&name.as_str())) {
            names.pop();
        }
        names
    };
    files.map(|file| (module(&file), file)).collect()
}

/// What a file names, its tests left out.
#[derive(Default)]
struct Named {
    /// Paths as they are written, those of `use` without their braces.
    paths: Vec<Vec<String>>,
    types: Vec<String>,
    /// Fields of the monitor.
    fields: BTreeSet<String>,
}

impl Named {
    fn tree(&mut self, tree: &syn::UseTree, mut before: Vec<String>) {
        match tree {
            syn::UseTree::Path(path) => {
                before.push(path.ident.to_string());
                self.tree(&path.tree, before);
            }
            syn::UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.tree(tree, before.clone()));
            }
            syn::UseTree::Name(name) => {
                before.push(name.ident.to_string());
                self.paths.push(before);
            }
            syn::UseTree::Rename(name) => {
                before.push(name.ident.to_string());
                self.paths.push(before);
            }
            syn::UseTree::Glob(_) => self.paths.push(before),
        }
    }
}

impl<'ast> Visit<'ast> for Named {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        // The only modules within files are tests.
        if item.content.is_none() {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.tree(&item.tree, Vec::new());
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.paths.push(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        visit::visit_path(self, path);
    }

    // `pub(super)` uses nothing.
    fn visit_vis_restricted(&mut self, _: &'ast syn::VisRestricted) {}

    fn visit_expr_field(&mut self, field: &'ast syn::ExprField) {
        let is_monitor = match &*field.base {
            syn::Expr::Path(base) => base.path.is_ident("monitor"),
            syn::Expr::Field(base) => is_named(&base.member, "monitor"),
            _ => false,
        };
        if let (true, syn::Member::Named(name)) = (is_monitor, &field.member) {
            self.fields.insert(name.to_string());
        }
        visit::visit_expr_field(self, field);
    }

    fn visit_pat_struct(&mut self, pattern: &'ast syn::PatStruct) {
        if pattern.path.is_ident("Monitor") {
            self.fields.extend(pattern.fields.iter().filter_map(|of| match &of.member {
                syn::Member::Named(name) => Some(name.to_string()),
                syn::Member::Unnamed(_) => None,
            }));
        }
        visit::visit_pat_struct(self, pattern);
    }

    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.types.push(item.ident.to_string());
        visit::visit_item_struct(self, item);
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.types.push(item.ident.to_string());
        visit::visit_item_enum(self, item);
    }
}

fn is_named(member: &syn::Member, name: &str) -> bool {
    matches!(member, syn::Member::Named(of) if of == name)
}

fn parsed(file: &Path) -> syn::File {
    let text = fs::read_to_string(file).expect("sources are text");
    syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

fn named(file: &Path) -> Named {
    let mut named = Named::default();
    named.visit_file(&parsed(file));
    named
}

/// The place of a module's layer among [`LAYERS`].
fn layer(module: &[String]) -> Option<usize> {
    match module {
        [layer, ..] => LAYERS.iter().position(|of| of == layer),
        [] => None,
    }
}

/// The fields of the monitor that belong to a layer, each with the highest layer of which its type is.
fn fields_by_layer() -> BTreeMap<String, usize> {
    let file = parsed(&src().join("shared.rs"));
    let mut named = Named::default();
    named.visit_file(&file);
    let of_type = |name: &str| {
        let of = named.paths.iter().find(|path| path.last().is_some_and(|last| last == name));
        of.and_then(|path| layer(path.get(1..)?))
    };
    let monitor = file.items.iter().find_map(|item| match item {
        syn::Item::Struct(item) if item.ident == "Monitor" => Some(item),
        _ => None,
    });
    let is_shared = |field: &&syn::Field| !matches!(field.vis, syn::Visibility::Inherited);
    let fields = monitor.expect("it is there").fields.iter().filter(is_shared);
    let fields = fields.filter_map(|field| {
        let mut types = Named::default();
        types.visit_type(&field.ty);
        let layers = types.paths.iter().flatten().filter_map(|name| of_type(name));
        Some((field.ident.as_ref()?.to_string(), layers.max()?))
    });
    fields.collect()
}

/// The file that a path which is written in `module` leads to, if it is another one of ours. What a module has below
/// it are its parts, and no others.
fn target(all: &BTreeMap<Module, PathBuf>, module: &Module, path: &[String]) -> Option<Module> {
    let mut rest = path;
    let mut at = match rest.first().map(String::as_str) {
        Some("crate") => Module::new(),
        Some("self" | "super") => module.clone(),
        _ => return None,
    };
    if ["crate", "self"].contains(&rest[0].as_str()) {
        rest = &rest[1..];
    }
    while rest.first().is_some_and(|name| name == "super") {
        at.pop();
        rest = &rest[1..];
    }
    for name in rest {
        let below = [&at[..], std::slice::from_ref(name)].concat();
        if !all.contains_key(&below) {
            break;
        }
        at = below;
    }
    (!at.starts_with(module) && all.contains_key(&at)).then_some(at)
}

#[test]
fn module_depends_on_lower_modules_only() {
    let all = modules();
    // A `mod.rs` that has nothing of its own, and names what the layer has for others.
    let is_interface = |module: &Module| module.len() == 1 && named(&all[module]).types.is_empty();
    let mut edges = BTreeSet::new();
    let mut wrong = BTreeSet::new();
    for (module, file) in &all {
        let targets = named(file).paths.into_iter().filter_map(|path| target(&all, module, &path));
        for target in targets {
            if let (Some(from), Some(to)) = (layer(module), layer(&target)) {
                edges.insert((from, to));
                // A file that uses its own layer's interface could hide a circle.
                if to > from || to == from && is_interface(&target) {
                    wrong.insert(format!("{} uses {}", module.join("/"), target.join("/")));
                }
            }
        }
    }
    let missing: Vec<_> = (0..LAYERS.len())
        .filter(|layer| edges.iter().all(|(from, to)| from != layer && to != layer))
        .collect();
    assert!(missing.is_empty(), "nothing was found of {missing:?}");
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn no_two_types_share_a_name() {
    let mut by_name: BTreeMap<String, BTreeSet<PathBuf>> = BTreeMap::new();
    for file in modules().into_values() {
        for name in named(&file).types {
            by_name.entry(name).or_default().insert(file.clone());
        }
    }
    by_name.retain(|_, files| files.len() > 1);
    assert!(by_name.is_empty(), "{by_name:#?}");
}

#[test]
fn module_uses_fields_of_lower_modules_only() {
    let by_layer = fields_by_layer();
    assert!(by_layer.len() > 12, "{by_layer:?}");
    let mut used = BTreeSet::new();
    let mut wrong = BTreeSet::new();
    for (module, file) in modules() {
        let Some(of) = layer(&module) else { continue };
        for name in named(&file).fields {
            match by_layer.get(&name) {
                Some(layer) if *layer > of => {
                    wrong.insert(format!(
                        "{} uses {name}, which {} has",
                        module.join("/"),
                        LAYERS[*layer]
                    ));
                }
                _ => _ = used.insert(name),
            }
        }
    }
    let unused: Vec<_> = by_layer.keys().filter(|name| !used.contains(*name)).collect();
    assert!(unused.is_empty(), "nothing was found of {unused:?}");
    assert!(wrong.is_empty(), "{wrong:#?}");
}
