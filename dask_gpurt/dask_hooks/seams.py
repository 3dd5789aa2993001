"""List the private parts of Dask that the runtime replaces or relies on, by the part that needs them.

:mod:`~dask_gpurt.dask_hooks.comparison` compares one entry with the installed Dask, and
:func:`~dask_gpurt.dask_hooks.require` all of them, before ``graphs``, ``planning``, ``shuffle``,
``worker`` and ``scheduler`` import the parts.
"""

from __future__ import annotations

from dask_gpurt.dask_hooks.comparison import Seam, SeamGroup

_EXTENSION = "distributed.shuffle._scheduler_plugin:ShuffleSchedulerPlugin."
_RUNS = "distributed.shuffle._worker_plugin:_ShuffleRunManager."
_PLUGIN = "distributed.shuffle._worker_plugin:ShuffleWorkerPlugin."
_ENGINE = "dask.dataframe.io.parquet.arrow:ArrowDatasetEngine."
_EXPR = "dask.dataframe.dask_expr."
_CORE = "distributed.shuffle._core:"
_TASKS = "dask._task_spec:"
_SCHEDULER = "distributed.scheduler:Scheduler."
_STATE = "distributed.scheduler:SchedulerState."

#: The task classes of graphs, and functions that tasks of dataframes call.
GRAPHS = SeamGroup(
    "graphs",
    (
        Seam(_TASKS + "Alias"),
        Seam(_TASKS + "GraphNode"),
        Seam(_TASKS + "GraphNode.block_fusion"),
        Seam(_TASKS + "Task", "key func args _data_producer kwargs"),
        Seam(_TASKS + "Task.fuse", "tasks key"),
        Seam(_TASKS + "TaskRef"),
        Seam("dask.dataframe.core:_concat", "args ignore_index"),
        Seam("dask.dataframe.multi:merge_chunk", "lhs args result_meta kwargs"),
        Seam("dask.dataframe.groupby:_compute_sum_of_squares", "grouped column"),
        Seam("dask.dataframe.groupby:_groupby_raise_unaligned", "df convert_by_to_list kwargs"),
    ),
)
#: Shuffle runs on the scheduler: methods of its extension that are replaced or called.
SCHEDULER_SHUFFLES = SeamGroup(
    "shuffles on the scheduler",
    (
        Seam(_EXTENSION + "_retrieve_spec", "self shuffle_id"),
        Seam(_EXTENSION + "_create", "self shuffle_id key worker"),
        Seam(_EXTENSION + "_calculate_worker_for", "self spec"),
        Seam(_EXTENSION + "_restart_recommendations", "self id"),
        Seam(_EXTENSION + "_set_restriction", "self ts worker"),
        Seam(_EXTENSION + "_fail_on_workers", "self shuffle message"),
        Seam(_EXTENSION + "_clean_on_scheduler", "self id stimulus_id"),
        Seam(_EXTENSION + "_restart_shuffle", "self id scheduler stimulus_id"),
        Seam(_EXTENSION + "_unset_restriction", "self ts"),
        Seam(_EXTENSION + "transition", "self key start finish args stimulus_id kwargs"),
        Seam(_EXTENSION + "remove_worker", "self scheduler worker stimulus_id kwargs"),
        Seam(_EXTENSION + "valid_workers_downscaling", "self scheduler workers"),
        Seam(_EXTENSION + "_shuffles"),
        Seam(_SCHEDULER + "broadcast", "self msg workers hosts nanny serializers on_error"),
        Seam("distributed.shuffle._exceptions:P2PConsistencyError"),
    ),
)
#: The specs and tasks that the runtime's own stand in for, and a worker's calls into runs.
WORKER_SHUFFLES = SeamGroup(
    "shuffles on workers",
    (
        Seam(_CORE + "ShuffleSpec.create_run_on_worker", "self run_id span_id worker_for plugin"),
        Seam(_CORE + "ShuffleSpec.create_new_run", "self worker_for span_id"),
        Seam(_CORE + "ShuffleSpec.pick_worker", "self partition workers"),
        Seam(_CORE + "ShuffleRunSpec", "spec worker_for span_id"),
        Seam(_CORE + "P2PBarrierTask", "key func args spec kwargs"),
        Seam(_CORE + "barrier_key", "shuffle_id"),
        Seam(_CORE + "id_from_key", "key"),
        Seam(
            "distributed.shuffle._shuffle:DataFrameShuffleSpec",
            "id disk npartitions column meta parts_out drop_column",
        ),
        Seam(
            "distributed.shuffle._shuffle:_get_worker_for_range_sharding",
            "npartitions output_partition workers",
        ),
        Seam("distributed.shuffle._shuffle:shuffle_transfer", "input id input_partition"),
        Seam("distributed.shuffle._shuffle:shuffle_unpack", "id output_partition barrier_run_id"),
        Seam(
            "distributed.shuffle._merge:merge_unpack",
            "shuffle_id_left shuffle_id_right output_partition barrier_left barrier_right how left_on "
            "right_on result_meta suffixes left_index right_index indicator",
            bodies=("fcd3c458d629",),
        ),
        Seam(_CORE + "get_worker_plugin", ""),
        Seam("distributed.shuffle._rechunk:ArrayRechunkSpec", "id disk new old"),
        Seam("distributed.shuffle._rechunk:rechunk_transfer", "input id input_chunk"),
        Seam("distributed.shuffle._rechunk:rechunk_unpack", "id output_chunk barrier_run_id"),
        Seam("dask.array.rechunk:old_to_new", "old_chunks new_chunks"),
        Seam("dask.array.core:concatenate3", "arrays"),
        Seam("distributed.shuffle._exceptions:ShuffleClosedError"),
        Seam(_RUNS + "_active_runs"),
        Seam(_RUNS + "fail", "self shuffle_id run_id message"),
        Seam(_RUNS + "get_or_create", "self shuffle_id key"),
        Seam(_RUNS + "get_with_run_id", "self shuffle_id run_id"),
        Seam(_PLUGIN + "_barrier", "self shuffle_id run_ids"),
        Seam(_PLUGIN + "add_partition", "self data partition_id id kwargs"),
        Seam(_PLUGIN + "get_output_partition", "self shuffle_id run_id partition_id meta"),
        Seam(_PLUGIN + "shuffle_receive", "self shuffle_id run_id data"),
    ),
)
#: Tasks and data on a worker: methods that are replaced or called.
WORKER = SeamGroup(
    "tasks and data of workers",
    (
        Seam("distributed.worker:Worker.execute", "self key stimulus_id"),
        Seam("distributed.worker:Worker.gather_dep", "self worker to_gather total_nbytes stimulus_id"),
        Seam("distributed.worker:Worker.get_data", "self comm keys who serializers"),
        Seam("distributed.worker:Worker.plugin_add", "self plugin name catch_errors"),
        Seam("distributed.core:Server._is_finalizing"),
        Seam("distributed.core:Server._ongoing_background_tasks"),
        Seam("distributed.core:AsyncTaskGroup.call_soon", "self afunc args kwargs"),
    ),
)
#: The functions by which tasks of ``dask.dataframe`` read and write Parquet files.
READ_PARQUET = Seam("dask.dataframe.io.parquet.core:ParquetFunctionWrapper.__call__", "self part")
WRITE_PARQUET = Seam(
    "dask.dataframe.io.parquet.core:ToParquetFunctionWrapper.__call__", "self df block_index"
)
#: The functions by which tasks read and write files, and the means by which a task leaves its slot.
READS = SeamGroup(
    "reads",
    (
        READ_PARQUET,
        WRITE_PARQUET,
        Seam(
            _EXPR + "io.parquet:ReadParquetPyarrowFS._fragment_to_table",
            "fragment_wrapper filters columns schema",
        ),
        Seam(
            _EXPR + "io.io:FusedParquetIO._load_multiple_files",
            "frag_filters columns schema to_pandas_kwargs",
        ),
        Seam(
            "dask.dataframe.io.csv:pandas_read_text",
            "reader b header kwargs dtypes columns write_header enforce path",
        ),
        Seam("dask.bytes.core:read_block_from_file", "lazy_file off bs delimiter"),
        Seam(_TASKS + "NestedContainer"),
        Seam(_TASKS + "Task.has_subgraph", "self"),
        Seam("distributed.worker_state_machine:SecedeEvent", "stimulus_id key compute_duration"),
        Seam(
            "distributed.worker_state_machine:WorkerState._transition_executing_long_running",
            "self ts compute_duration stimulus_id",
        ),
        Seam("distributed.threadpoolexecutor:ThreadPoolExecutor._adjust_thread_count", "self"),
        Seam("distributed.threadpoolexecutor:rejoin"),
        Seam("distributed.threadpoolexecutor:thread_state"),
    ),
    without="a task that reads keeps its slot",
)
#: How a worker executes the graph of a fused task.
EXECUTION = SeamGroup(
    "fused tasks",
    (
        Seam(_TASKS + "execute_graph", "dsk cache keys"),
        Seam(_TASKS + "TaskRef"),
        Seam(_EXPR + "_expr:Assign.operation", "df pairs"),
        Seam(_EXPR + "_accessor:FunctionMap.operation", "obj accessor attr args kwargs"),
        Seam(_EXPR + "_accessor:PropertyMap.operation", "obj accessor attr"),
        Seam(_EXPR + "_expr:RenameFrame.operation", "df columns"),
    ),
    without="the nodes of fused tasks run through the dataframe library",
)
#: Everything that a client needs to build graphs.
EXPRESSIONS = SeamGroup(
    "expressions",
    (
        Seam("dask._expr:Expr.__dask_graph__", "self"),
        Seam(_EXPR + "_shuffle:Shuffle._lower", "self"),
        Seam(_EXPR + "_shuffle:SortValues._lower", "self"),
        Seam(_EXPR + "_reductions:ShuffleReduce._lower", "self"),
        Seam(_EXPR + "_merge:Merge._lower", "self"),
        Seam(_EXPR + "_merge:Merge._simplify_up", "self parent dependents"),
        Seam(_EXPR + "_merge:Merge.is_broadcast_join", "self"),
        Seam(_EXPR + "_merge:Merge._on_condition_already_partitioned", "self expr on"),
        Seam(_EXPR + "_reductions:ApplyConcatApply.need_to_shuffle", "self"),
        Seam(_EXPR + "_groupby:_contains_index_name", "index_name by"),
        Seam(_EXPR + "_groupby:groupby_projection", "expr parent dependents"),
        Seam(_EXPR + "_groupby:GroupByCumulativeFinalizer._layer", "self"),
        Seam(_EXPR + "_cumulative:CumulativeAggregations._lower", "self"),
        Seam(_EXPR + "_groupby:GroupByApply.need_to_shuffle", "self", bodies=("4a9105165193",)),
        Seam(_EXPR + "_groupby:GroupByApply._lower", "self"),
        Seam(_EXPR + "_expr:Expr._projection_columns", "self"),
        Seam(_EXPR + "_expr:Elemwise._simplify_up", "self parent dependents"),
        Seam(_EXPR + "_expr:Filter._simplify_up", "self parent dependents"),
        Seam(_EXPR + "_expr:AsType._simplify_up", "self parent dependents"),
        Seam(_EXPR + "_expr:Head._simplify_down", "self"),
        Seam(_EXPR + "_reductions:Reduction._simplify_up", "self parent dependents"),
        Seam(_EXPR + "_expr:ResetIndex._simplify_up", "self parent dependents"),
        Seam(_EXPR + "_shuffle:SortValues._simplify_up", "self parent dependents"),
        Seam(_EXPR + "_groupby:GroupByReduction.chunk_kwargs", "self"),
        Seam(_EXPR + "_groupby:GroupByReduction.combine_kwargs", "self"),
        Seam(_EXPR + "_groupby:GroupByReduction.aggregate_kwargs", "self"),
        Seam(_EXPR + "_reductions:ApplyConcatApply._lower", "self"),
        Seam(
            "dask.dataframe.groupby:_build_agg_args_var",
            "result_column func func_args func_kwargs input_column",
            bodies=("cc8024e9722f",),
        ),
        Seam(_EXPR + "_reductions:Mean._lower", "self"),
        Seam(_EXPR + "_collection:FrameBase.__getitem__", "self other"),
        Seam(_EXPR + "_collection:DataFrame.sort_values"),
        Seam(_EXPR + "_collection:DataFrame.assign", "self pairs"),
        Seam(_EXPR + "_expr:Assign._remove_common_columns", "self other"),
        Seam(_EXPR + "_expr:OpAlignPartitions._lower", "self"),
        Seam(
            "dask.dataframe.groupby:_build_agg_args_mean",
            "result_column func input_column",
            bodies=("19e1631c28fe",),
        ),
        Seam(_EXPR + "_shuffle:_get_divisions"),  # dask_cudf replaces it, with other parameters
        Seam(_EXPR + "_shuffle:P2PShuffle._layer", "self"),
        Seam(_EXPR + "_merge:BlockwiseMerge._task", "self name index"),
        Seam(_EXPR + "_merge:BroadcastJoin._layer", "self", bodies=("342b6da8daea",)),
        Seam(_EXPR + "_merge:HashJoinP2P._layer", "self"),
        Seam(_EXPR + "_merge:create_assign_index_merge_transfer", ""),
        Seam(
            _EXPR + "_shuffle:AssignPartitioningIndex.operation",
            "df index name npartitions meta index_shuffle",
        ),
        Seam(_EXPR + "_shuffle:_SetPartitionsPreSetIndex.operation"),
        Seam(_EXPR + "_shuffle:get_default_shuffle_method", ""),
        Seam(_EXPR + "_merge:get_default_shuffle_method", ""),
        Seam(_EXPR + "_collection:get_default_shuffle_method", ""),
        Seam(_EXPR + "_collection:_get_shuffle_preferring_order", "shuffle"),
        Seam(_EXPR + "_collection:merge"),
        Seam("dask.dataframe:merge"),
        Seam(_EXPR + "_util:_convert_to_list", "column"),
        Seam("dask.base:compute", "args traverse optimize_graph scheduler get kwargs"),
        Seam("dask.base:persist", "args traverse optimize_graph scheduler kwargs"),
        Seam("dask.base:get_scheduler", "get scheduler collections cls"),
        Seam(_EXPR + "_collection:FrameBase.persist", "self fuse kwargs"),
    ),
)
#: Planning on the client: expressions, their metadata, plans, and facts about Parquet files.
PLANNING = SeamGroup(
    "planning",
    (
        Seam("dask._expr:SingletonExpr.__new__", "cls args _determ_token kwargs", bodies=("3d05bef20fb8",)),
        Seam("dask._expr:optimize_until", "expr stage", bodies=("4a3ba39e6083",)),
        Seam("dask._expr:FinalizeCompute"),
        Seam("dask._expr:_ExprSequence"),
        Seam("dask._task_spec:convert_legacy_graph"),
        Seam("dask.tokenize:_tokenize_deterministic", "args kwargs"),
        Seam("dask.tokenize:normalize_token"),
        Seam(_EXPR + "_expr:Isin"),
        Seam(_EXPR + "_expr:Literal"),
        Seam(_EXPR + "_expr:_DelayedExpr"),
        Seam(_EXPR + "_expr:is_valid_blockwise_op", "expr"),
        Seam(_EXPR + "_expr:Fused"),
        Seam(_EXPR + "_repartition:RepartitionSize"),
        Seam(_EXPR + "_quantiles:RepartitionQuantiles"),
        Seam(_EXPR + "_merge:Merge._meta", "self", bodies=("7c0a8d4b8c24",)),
        Seam(_EXPR + "_expr:Projection._meta", "self", bodies=("13de50e69369",)),
        Seam(_EXPR + "_expr:Blockwise._meta", "self", bodies=("69e022db907c",)),
        Seam(_EXPR + "_expr:Assign._meta", "self", bodies=("5d6377ef6b5f",)),
        Seam(_EXPR + "_reductions:ApplyConcatApply._meta", "self", bodies=("fc1f6575f429",)),
        Seam(_EXPR + "_groupby:GroupbyAggregation._meta", "self", bodies=("ae71eae6efc9",)),
        Seam(_EXPR + "_groupby:GroupByChunk._meta", "self", bodies=("7557481765df",)),
        Seam(_EXPR + "_reductions:DropDuplicates._meta", "self", bodies=("c0bef4b0806b",)),
        Seam(_EXPR + "_expr:AsType._meta", "self", bodies=("b6a4493b6f3a",)),
        Seam(_EXPR + "_expr:Isin._meta", "self", bodies=("807e421a20c2",)),
        Seam(_EXPR + "_accessor:FunctionMap._meta", "self", bodies=("7557481765df",)),
        Seam(_EXPR + "_concat:Concat._meta", "self", bodies=("68ba76724b9c",)),
        Seam(_EXPR + "io.parquet:ReadParquet._meta", "self", bodies=("c6e1b938295f",)),
        Seam(_EXPR + "_expr:Expr.columns", "self", bodies=("c8f9f1bf54f2",)),
        Seam(_EXPR + "io.parquet:ReadParquet.columns", "self", bodies=("bc7c423c927d",)),
        Seam(_EXPR + "_expr:Expr.ndim", "self", bodies=("bb36e4651f03",)),
        Seam(_EXPR + "_collection:new_collection", "expr", bodies=("c36bbe3e051b",)),
        Seam(_EXPR + "_expr:Binop._divisions", "self", bodies=("a9807204db98",)),
        *(
            Seam(f"{_EXPR}{module}:is_dataframe_like", "df", bodies=("870720ce30c5",))
            for module in ("io.io", "_expr", "_collection", "_groupby", "_reductions")
        ),
        Seam(_EXPR + "io.parquet:ReadParquetFSSpec._dataset_info", "self", bodies=("07fa9df6259c",)),
        Seam(_EXPR + "io.parquet:ReadParquetPyarrowFS._dataset_info", "self", bodies=("8cf372230c97",)),
        Seam(_EXPR + "io.parquet:ReadParquet.__dask_tokenize__", "self", bodies=("385e19a8fbb8",)),
        Seam(_EXPR + "io.parquet:FragmentWrapper", "fragment filesystem file_size fragment_packed"),
        Seam(_EXPR + "io.parquet:_CACHED_PLAN_SIZE"),
        Seam(_EXPR + "io.parquet:_STATS_CACHE"),
        Seam(_EXPR + "io.io:FromMap"),
        Seam(_EXPR + "io.io:FusedIO._task", "self name index"),
        Seam(_EXPR + "io.io:FusedParquetIO._task", "self name index"),
        Seam(
            _EXPR + "_repartition:RepartitionToFewer._compute_partition_boundaries",
            "n_new_partitions n_old_partitions",
        ),
        Seam(_EXPR + "_shuffle:_contains_index_name", "df columns_or_index"),
        Seam(_EXPR + "_merge:_contains_index_name", "df columns_or_index"),
    ),
    without="each query is planned anew, and no tasks are fused, as with Dask",
)
#: How expressions are made and named, and all that decides on the names of those that are named faster.
MAKING = SeamGroup(
    "making expressions",
    (
        Seam("dask._expr:Expr.__new__", "cls args _determ_token kwargs", bodies=("784f850bbfeb",)),
        Seam("dask._expr:Expr.__dask_tokenize__", "self", bodies=("0a8bf8f61961",)),
        Seam("dask._expr:_unpack_collections", "o"),
        Seam("dask.tokenize:tokenize", "args ensure_deterministic kwargs", bodies=("f29789888627",)),
        Seam("dask.tokenize:_tokenize", "args kwargs", bodies=("cfd6c5c6818f",)),
        Seam("dask.tokenize:_normalize_seq_func", "seq", bodies=("4014e04b14ac",)),
        Seam("dask.tokenize:normalize_seq", "seq", bodies=("611c6bdd868a",)),
        Seam("dask.tokenize:normalize_dict", "d", bodies=("c1d5df081dee",)),
        Seam("dask.tokenize:normalize_partial", "func", bodies=("01ff94c344c6",)),
        Seam("dask.tokenize:normalize_bound_method", "meth", bodies=("c5e459b21ae3",)),
        Seam("dask.tokenize:normalize_object", "o", bodies=("108df734f282",)),
    ),
    without="planning takes longer",
)
#: How a task reads a Parquet file for pandas: which of it is replaced, to read dictionaries.
DICTIONARY_READS = SeamGroup(
    "dictionaries in files",
    (
        Seam(
            _ENGINE + "read_partition",
            "cls fs pieces columns index dtype_backend categories partitions filters schema kwargs",
        ),
        Seam(
            _ENGINE + "_read_table",
            "cls path_or_frag fs row_groups columns schema filters partitions partition_keys kwargs",
        ),
        Seam(
            _ENGINE + "_arrow_table_to_pandas",
            "cls arrow_table categories dtype_backend convert_string kwargs",
        ),
        Seam(
            "dask.dataframe.io.parquet.core:ParquetFunctionWrapper.__init__",
            "self engine fs meta columns index dtype_backend kwargs common_kwargs",
        ),
    ),
    without="the strings of keys are read one by one",
)
#: How a client gets the results of a computation, and the task that puts the partitions of one together.
RESULTS_FOR_CLIENTS = SeamGroup(
    "results for clients",
    (
        Seam(
            "distributed.client:Client.get",
            "self dsk keys workers allow_other_workers resources sync asynchronous direct retries priority "
            "fifo_timeout actors kwargs",
        ),
        Seam(_EXPR + "_repartition:RepartitionToFewer._layer", "self", bodies=("f3ed13e5e1a9",)),
        Seam("dask.dataframe.core:_concat", "args ignore_index"),
        Seam("distributed.client:Client._gather", "self futures errors direct local_worker"),
        Seam("distributed.worker:get_data_from_worker", "rpc keys worker who serializers deserializers"),
    ),
    without="results are put together on a worker, and go through the scheduler",
)
#: The lookup of a task's run.
RUN_LOOKUP = SeamGroup(
    "run lookup",
    (
        Seam(_PLUGIN + "get_or_create_shuffle", "self shuffle_id"),
        Seam(_PLUGIN + "get_shuffle_run", "self shuffle_id run_id"),
    ),
    without="tasks look up their run on the event loop",
)
#: Giving a worker results that it neither computes nor fetches, and metadata in its task-finished messages.
RESULTS = SeamGroup(
    "results",
    (
        Seam(_STATE + "add_replica", "self ts ws"),
        Seam(_SCHEDULER + "release_worker_data", "self key worker stimulus_id"),
        Seam(_SCHEDULER + "stimulus_task_finished", "self worker stimulus_id key run_id metadata kwargs"),
        Seam("distributed.worker_state_machine:UpdateDataEvent", "stimulus_id data"),
        Seam(
            "distributed.worker_state_machine:WorkerState._transition_released_memory",
            "self ts value run_id stimulus_id",
        ),
    ),
    without="barriers and outputs of shuffles fetch the results that they need",
)
#: The choices of the scheduler that send reads to where their files are cached.
READ_PLACES = SeamGroup(
    "places of reads",
    (
        Seam(_STATE + "decide_worker_non_rootish", "self ts"),
        Seam(_STATE + "is_rootish", "self ts"),
        Seam(_STATE + "get_comm_cost", "self ts ws"),
    ),
    without="reads go to any worker, whatever it has kept of their files",
)
#: The retirement of a worker: waiting for its data to be replicated, and its removal.
RETIREMENT = SeamGroup(
    "retirement",
    (Seam(_SCHEDULER + "_track_retire_worker", "self ws policy prev_status close remove stimulus_id"),),
    without="inputs of shuffles that a retired worker had transferred are transferred again",
)
#: How tasks are rebuilt when the graph of a bag is optimised.
BAGS = SeamGroup(
    "bags",
    (Seam("dask.bag.core:lazify_task", "task start"),),
    without="bags of shuffled dataframes cannot be computed",
)
#: The HTTP server of a running scheduler, to which pages are added.
HTTP = SeamGroup(
    "pages of the scheduler",
    (
        Seam("distributed.http.utils:get_handlers", "server modules prefix"),
        Seam("distributed.http.routing:RoutingApplication.add_application", "self application"),
        Seam("distributed.node:ServerNode.start_http_server"),
    ),
    without="the dashboard does not list the page of the runtime",
)
#: The connection of a client to its scheduler.
RECONNECTING = SeamGroup(
    "clients",
    (Seam("distributed.client:Client._reconnect", "self"),),
    without="a client that connects again does not ask whether the runtime is on",
)
#: The pages of a scheduler's dashboard. Comparing one of them imports Bokeh.
DASHBOARD = SeamGroup(
    "dashboard",
    (
        Seam("distributed.dashboard.scheduler:template_variables", "scheduler"),
        Seam("distributed.http.routing:RoutingApplication.find_handler", "self request kwargs"),
    ),
    without="the menu of the dashboard does not name the page of the runtime",
)

#: The groups that every process of a cluster needs. All check all of them, to come to the same verdict.
REQUIRED = (GRAPHS, SCHEDULER_SHUFFLES, WORKER_SHUFFLES, WORKER, EXPRESSIONS)
PARTS = (
    *REQUIRED,
    READS,
    PLANNING,
    MAKING,
    DICTIONARY_READS,
    RESULTS_FOR_CLIENTS,
    RUN_LOOKUP,
    RESULTS,
    RETIREMENT,
    BAGS,
    RECONNECTING,
    HTTP,
    READ_PLACES,
)
