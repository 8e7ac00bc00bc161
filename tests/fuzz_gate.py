"""The live gates that random micro-batches are sent through: real engines of one rank.

Every input goes through a whole MoE layer of an installed engine and is compared with the
reference: counts, ``l_aux``, and the gradient that balancing sends into the gate.
"""

from typing import Any

import torch

import reference
from engine_grid import COEFF, Cell, make_engine
from models import MODEL_DIM, TinyMoE, select

NUM_EXPERTS = (8, 4)


class LiveGates:
    """One engine for each k and each mechanism."""

    def __init__(self) -> None:
        self._engines: dict[tuple[int, bool], Any] = {}

    def engine(self, top_k: int, injects: bool) -> Any:
        if (top_k, injects) not in self._engines:
            mechanism = "injection" if injects else "l_aux"
            cell = Cell(1, 1, 0, 1, top_k, "off", "even", "running", mechanism)
            model = TinyMoE(k=top_k, num_experts=NUM_EXPERTS, drop_tokens=False)
            section = {"aux_loss_coeff": COEFF} if injects else {}
            self._engines[top_k, injects] = make_engine(cell, model, section)
        return self._engines[top_k, injects]

    def check(self, drawn: dict[str, Any]) -> None:
        """The right value, or a ValueError that names both lengths of a mask that does not fit."""
        engine = self.engine(drawn["top_k"], drawn["injects"])
        block, balancer = engine.module.blocks[0], engine.load_balancer
        gate = engine.module.gates()[0]
        num_tokens, mask = drawn["num_tokens"], drawn["mask"]
        if num_tokens == 0:
            return  # DeepSpeed itself refuses a micro-batch without tokens, or makes it NaN
        generator = torch.Generator().manual_seed(drawn["seed"])
        x = drawn["scale"] * torch.randn(1, num_tokens, MODEL_DIM, generator=generator)
        weight_EM = torch.randn(NUM_EXPERTS[0], MODEL_DIM, generator=generator)
        if drawn["not_finite"] is not None:
            x[0, drawn["where"], 0] = drawn["not_finite"]
        with torch.no_grad():
            gate.wg.weight.copy_(weight_EM)
        gate.wg.weight.grad = None
        valid_mask = None
        if mask is not None:
            longer = torch.cat([torch.tensor(mask), torch.ones(2, dtype=torch.bool)])
            valid_mask = longer[: max(num_tokens + drawn["mask_length"], 0)]
        used_token, token_mask = None, valid_mask
        if drawn["mask_by"] == "used_token" and valid_mask is not None:
            used_token, token_mask = valid_mask.long(), None

        balancer.start_window()
        balancer.before_forward(training=True)
        balancer.current_masks = () if token_mask is None else (("token_mask", token_mask),)
        try:
            output, l_aux = block(x, used_token)
            balancer.after_forward()
        except (ValueError, RuntimeError) as error:
            assert mask is not None and drawn["mask_length"] != 0, error
            if used_token is None or drawn["top_k"] > 1:  # k = 1: the parent multiplies first
                assert f"{valid_mask.numel()} entries" in str(error), error
                assert f"got {num_tokens} tokens" in str(error), error
            return
        finally:
            balancer.leave_forward()
            balancer.current_masks = ()
        assert mask is None or drawn["mask_length"] == 0, "a mask that does not fit was taken"
        (output.sum() * 0.0 + COEFF * l_aux).backward()

        valid = [True] * num_tokens if mask is None else mask
        counts = balancer.counts()[balancer.layout.layers[0].name].tolist()
        assert sum(counts) == drawn["top_k"] * sum(valid)
        if not x.isfinite().all():
            others_are_finite = x[0][torch.tensor(valid)].isfinite().all()
            assert l_aux.isfinite() == others_are_finite or drawn["injects"]
            return
        selections = select(x[0], weight_EM, k=drawn["top_k"]).tolist()
        window = reference.Window(
            weight_EM.tolist(), [[x[0].tolist()]], [[selections]], [[valid]], drawn["top_k"]
        )
        expected = reference.balance(window, estimate="running", coeff=COEFF)
        assert counts == expected.counts[0][0]
        share = 0.0 if drawn["injects"] else expected.shares[0][0]
        assert abs(l_aux.item() - share) <= 1e-5 * max(1.0, abs(share)), (l_aux.item(), share)
        grad_EM = torch.tensor(expected.weight_grad, dtype=torch.float64)
        # fp32 logits up to 30 are off by 2e-6, and so is the probability that exp makes of one,
        # relatively; where the softmax saturates, f - sum f p cancels to its rounding, times w E x.
        tolerance = 5e-6 + 2e-5 * float(grad_EM.abs().max())
        difference = (gate.wg.weight.grad.double() - grad_EM).abs()
        assert (difference <= tolerance).all(), f"off by {float(difference.max()):.2e}"
